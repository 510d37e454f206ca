#include "schedule_choice.h"

#include <spdlog/fmt/fmt.h>

#include <algorithm>
#include <array>
#include <limits>

#include "config/words.h"
#include "simulated_stages.h"
#include "step_timeline.h"

namespace ferry::train {

using planner::Plan;

namespace {

constexpr std::array kOfOneRun{PipelineSchedule::one_f_one_b, PipelineSchedule::zero_bubble,
                               PipelineSchedule::round_robin};
constexpr std::array kOfSeveralRuns{PipelineSchedule::interleaved, PipelineSchedule::round_robin};

bool speculates(const PlannedSchedule& planned) {
    return std::ranges::all_of(planned.plans, &Plan::speculative);
}

ScheduleOffer offer_of(const PlannedSchedule& planned, const RecordedStages& steps,
                       const model::Decoder& decoder, cost::Measurements measured) {
    constexpr auto kCompute = static_cast<size_t>(swap::Lane::compute);
    add_assumed_kernels(planned.plans, steps, decoder, measured);
    const std::vector<swap::Timeline> timelines =
        predict_stages(planned.plans, steps.first, steps.steady, measured);
    ScheduleOffer offer{.schedule = planned.schedule};
    for (const swap::Timeline& timeline : timelines)
        offer.seconds = std::max(offer.seconds, timeline.step_seconds);
    for (size_t s = 0; s < planned.plans.size(); ++s) {
        const Plan& plan = planned.plans[s];
        const swap::Timeline& timeline = timelines[s];
        const double waits = 1 - timeline.busy_seconds[kCompute] / timeline.step_seconds;
        const auto raise = [](auto& most, auto value) { most = std::max(most, value); };
        raise(offer.waits, waits);
        raise(offer.weight_bytes, weight_bytes(plan, steps.steady[s]));
        raise(offer.device_bytes, plan.device_bytes + plan.device_overhead_bytes);
        raise(offer.host_bytes, plan.host_bytes);
        raise(offer.nvme_bytes, plan.nvme_bytes);
    }
    return offer;
}

}  // namespace

bool chooses_schedule(const Config& config) {
    return config.parallel.pipeline > 1 && config.parallel.schedule == PipelineSchedule::automatic;
}

std::span<const PipelineSchedule> schedules_to_choose(const Config& config) {
    if (config.parallel.virtual_stages > 1) return kOfSeveralRuns;
    return kOfOneRun;
}

Config with_schedule(Config config, PipelineSchedule schedule) {
    config.parallel.schedule = schedule;
    return config;
}

std::string_view name_of(PipelineSchedule schedule) {
    return config::word_of(config::kPipelineSchedules, schedule);
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
                               const cost::Measurements& measured) {
    std::vector<RecordedStages> steps;
    bool all_known = true;
    for (const PlannedSchedule& one : planned) {
        steps.push_back(one.refusal ? RecordedStages{} : record_stages(one.plans, speculates(one)));
        if (!one.refusal)
            all_known = all_known && covers(one.plans, steps.back(), measured.kernels);
    }
    // Some as measured and others by arithmetic would not compare.
    cost::Measurements alike = measured;
    if (!all_known) alike.kernels = {};
    ScheduleChoice choice;
    for (size_t i = 0; i < planned.size(); ++i) {
        if (planned[i].refusal)
            choice.offers.push_back(
                {.schedule = planned[i].schedule, .refusal = std::move(planned[i].refusal)});
        else
            choice.offers.push_back(offer_of(planned[i], steps[i], decoder, alike));
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
    const char* why = std::ranges::count_if(choice.offers, fits) == 1 ? "which alone can be"
                      : is_fastest                                    ? "the fastest as simulated"
                                   : "within 1 % of the fastest as simulated";
    std::string text = fmt::format("{}, {}", name_of(taken.schedule), why);
    const char* between = ": ";
    for (const ScheduleOffer& offer : choice.offers) {
        text += std::exchange(between, "; ");
        if (offer.refusal)
            text += fmt::format("not {}: {}", name_of(offer.schedule), why_not(*offer.refusal));
        else
            text += fmt::format("{} {:.4g} s a step, of which a stage waits up to {:.1f} %",
                                name_of(offer.schedule), offer.seconds, 100 * offer.waits);
    }
    return text;
}

}  // namespace ferry::train
