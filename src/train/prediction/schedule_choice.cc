#include "schedule_choice.h"

#include <spdlog/fmt/fmt.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <utility>

#include "config/words.h"
#include "simulated_stages.h"

namespace ferry::train {

using planner::Plan;

namespace {

// In the order of the configuration's key: what takes less memory comes first.
constexpr std::array kSchedules{PipelineSchedule::one_f_one_b, PipelineSchedule::zero_bubble,
                                PipelineSchedule::interleaved, PipelineSchedule::round_robin};

bool takes(PipelineSchedule schedule, int virtual_stages) {
    switch (schedule) {
        case PipelineSchedule::one_f_one_b:
        case PipelineSchedule::zero_bubble:
            return virtual_stages == 1;
        case PipelineSchedule::interleaved:
            return virtual_stages > 1;
        case PipelineSchedule::round_robin:
            return true;
        case PipelineSchedule::automatic:
            break;
    }
    bug("no such schedule");
}

// Those of stages of so many blocks; of an uneven cut 1 alone.
std::vector<int> numbers_to_choose(PipelineSchedule schedule, int64_t blocks, int stages) {
    std::vector<int> found;
    const int64_t each = blocks % stages == 0 ? blocks / stages : 1;
    for (int count = 1; count <= kMostVirtualStages; count *= 2)
        if (each % count == 0 && takes(schedule, count)) found.push_back(count);
    if (schedule == PipelineSchedule::round_robin && each > 1 &&
        std::ranges::find(found, each) == found.end())
        found.push_back(static_cast<int>(each));
    return found;
}

ScheduleOffer offer_of(const PlannedSchedule& planned, const model::Decoder& decoder,
                       const cost::Measurements& measured) {
    const std::vector<StageStep> steps =
        simulate_stages(planned.plans, speculate(planned.plans), decoder, measured);
    ScheduleOffer offer{.order = planned.order};
    for (size_t s = 0; s < planned.plans.size(); ++s) {
        const Plan& plan = planned.plans[s];
        const auto raise = [](auto& most, auto value) { most = std::max(most, value); };
        raise(offer.seconds, steps[s].seconds);
        raise(offer.waits, 1 - steps[s].compute_seconds() / steps[s].seconds);
        raise(offer.weight_bytes, static_cast<int64_t>(std::llround(steps[s].weight_bytes)));
        raise(offer.device_bytes, plan.device_bytes + plan.device_overhead_bytes);
        raise(offer.host_bytes, plan.host_bytes);
        raise(offer.nvme_bytes, plan.nvme_bytes);
    }
    return offer;
}

// Whether these times have the kernels of a step, which those of a few groups have all.
bool all_known(const PlannedSchedule& planned, const cost::Measurements& measured) {
    if (measured.kernels.seconds.empty()) return false;
    const std::vector<Plan> few =
        shortened(planned.plans, std::min(passing(planned.plans.front()), kGroupsOfAllKinds));
    return covers(few, record_stages(few, speculate(planned.plans)), measured.kernels);
}

}  // namespace

bool chooses_schedule(const Config& config) {
    const ParallelConfig& p = config.parallel;
    return p.pipeline > 1 &&
           (p.schedule == PipelineSchedule::automatic || !p.virtual_stages.has_value());
}

std::vector<StageOrder> orders_to_choose(const Config& config, int64_t blocks) {
    const ParallelConfig& p = config.parallel;
    std::vector<StageOrder> found;
    for (const PipelineSchedule schedule : kSchedules) {
        if (p.schedule != PipelineSchedule::automatic && p.schedule != schedule) continue;
        if (!p.virtual_stages) {
            for (const int count : numbers_to_choose(schedule, blocks, p.pipeline))
                found.push_back({schedule, count});
        } else if (takes(schedule, *p.virtual_stages)) {
            found.push_back({schedule, *p.virtual_stages});
        }
    }
    // Interleaved stages that no such number divides have two runs, or are refused with the blocks.
    if (found.empty()) found.push_back({p.schedule, 2});
    return found;
}

Config with_order(Config config, const StageOrder& order) {
    config.parallel.schedule = order.schedule;
    config.parallel.virtual_stages = order.virtual_stages;
    return config;
}

std::string_view name_of(PipelineSchedule schedule) {
    return config::word_of(config::kPipelineSchedules, schedule);
}

std::string name_of(const StageOrder& order) {
    if (order.virtual_stages == 1) return std::string(name_of(order.schedule));
    return fmt::format("{} {}", name_of(order.schedule), order.virtual_stages);
}

Problem of_stage(Problem problem, const zero::Stage& stage) {
    problem.what += fmt::format(" (stage {} of {})", stage.index, stage.count);
    return problem;
}

std::optional<size_t> fastest_of(std::span<const ScheduleOffer> offers) {
    constexpr double kAlike = 1.01;
    double least_s = std::numeric_limits<double>::infinity();
    for (const ScheduleOffer& offer : offers)
        if (!offer.refusal) least_s = std::min(least_s, offer.seconds);
    for (size_t i = 0; i < offers.size(); ++i)
        if (!offers[i].refusal && offers[i].seconds <= kAlike * least_s) return i;
    return std::nullopt;
}

ScheduleChoice choose_schedule(std::vector<PlannedSchedule> planned, const model::Decoder& decoder,
                               const cost::Measurements& measured,
                               const std::function<void()>& after_each) {
    ScheduleChoice choice;
    bool known = true;
    for (const PlannedSchedule& one : planned) {
        if (one.refusal) continue;
        known = known && all_known(one, measured);
        choice.is_long = choice.is_long || short_steps_of(one.plans).has_value();
    }
    // Some as measured and others by arithmetic would not compare.
    cost::Measurements alike = measured;
    if (!known) alike.kernels = {};
    for (PlannedSchedule& one : planned) {
        if (one.refusal)
            choice.offers.push_back({.order = one.order, .refusal = std::move(one.refusal)});
        else
            choice.offers.push_back(offer_of(one, decoder, alike));
        if (after_each) after_each();
    }
    choice.chosen = fastest_of(choice.offers).value_or(0);
    return choice;
}

std::string why_not(const Error& refusal) {
    const Problem& problem = refusal.problem();
    std::string text = problem.what;
    if (!problem.measured.empty()) text += ": " + problem.measured;
    if (!problem.limit.empty()) text += ", limit " + problem.limit;
    return text;
}

std::string text_of(const ScheduleChoice& choice) {
    const ScheduleOffer& taken = choice.offers[choice.chosen];
    const auto fits = [](const ScheduleOffer& offer) { return !offer.refusal; };
    const bool is_fastest = std::ranges::all_of(choice.offers, [&](const ScheduleOffer& offer) {
        return offer.refusal || offer.seconds >= taken.seconds;
    });
    const auto possible = std::ranges::count_if(choice.offers, fits);
    std::string why = possible == 0   ? "the first that the ranks have room for; none was simulated"
                      : possible == 1 ? "which alone can be"
                      : is_fastest    ? "the fastest as simulated"
                                      : "within 1 % of the fastest as simulated";
    if (choice.is_long && possible > 0) why += " by shorter steps, as a step is long";
    std::string text = fmt::format("{}, {}", name_of(taken.order), why);
    const char* between = ": ";
    for (const ScheduleOffer& offer : choice.offers) {
        text += std::exchange(between, "; ");
        if (offer.refusal)
            text += fmt::format("not {}: {}", name_of(offer.order), why_not(*offer.refusal));
        else
            text += fmt::format("{} {:.4g} s a step, of which a stage waits up to {:.1f} %",
                                name_of(offer.order), offer.seconds, 100 * offer.waits);
    }
    return text;
}

}  // namespace ferry::train
