#include "simulated_stages.h"

#include "cost/kernel_times.h"
#include "cost/operations.h"
#include "planner/work.h"
#include "step_timeline.h"
#include "train/stack/device_needs.h"
#include "train/step/step.h"

namespace ferry::train {

using planner::Plan;

namespace {

bool in_turn(const Plan& plan) { return plan.partition.stage.round_robin && plan.groups == 1; }

}  // namespace

int64_t passing(const Plan& plan) { return in_turn(plan) ? plan.micro_batches : plan.groups; }

std::vector<Plan> shortened(std::vector<Plan> plans, int64_t count) {
    for (Plan& plan : plans) {
        const int64_t size = in_turn(plan) ? 1 : plan.group_size();
        if (!in_turn(plan)) plan.groups = count;
        plan.micro_batches = count * size;
    }
    return plans;
}

double ShortSteps::at(int64_t count, double of_from, double of_to) const {
    return of_to +
           (of_to - of_from) * static_cast<double>(count - to) / static_cast<double>(to - from);
}

double ShortSteps::at_all(double of_from, double of_to) const { return at(all, of_from, of_to); }

double ShortSteps::seconds_at_all(std::span<const StageStep> of_from,
                                  std::span<const StageStep> of_to) const {
    double seconds = 0;
    for (size_t s = 0; s < of_to.size(); ++s) {
        seconds = std::max(seconds, at_all(of_from[s].seconds, of_to[s].seconds));
        for (size_t lane = 0; lane < swap::kLanes; ++lane)
            seconds = std::max(seconds, at_all(of_from[s].lanes[lane], of_to[s].lanes[lane]));
    }
    return seconds;
}

bool ShortSteps::may_hide_waits(std::span<const StageStep> of_from,
                                std::span<const StageStep> of_to) const {
    constexpr double kFew = 0.1;  // of the seconds between both: the line errs by no more
    constexpr std::array kOnceAStep{swap::Lane::comm, swap::Lane::read, swap::Lane::write,
                                    swap::Lane::team};
    double once_s = 0, step_s = 0;
    for (size_t s = 0; s < of_to.size(); ++s) {
        double of_stage_s = 0;
        for (const swap::Lane lane : kOnceAStep) {
            const double from_s = of_from[s].lanes[static_cast<size_t>(lane)],
                         to_s = of_to[s].lanes[static_cast<size_t>(lane)];
            of_stage_s += at(0, from_s, to_s);
        }
        once_s = std::max(once_s, of_stage_s);
        step_s = std::max(step_s, of_to[s].seconds - of_from[s].seconds);
    }
    return once_s > kFew * step_s;
}

bool ShortSteps::are_steady(std::span<const StageStep> of_from,
                            std::span<const StageStep> of_to) const {
    constexpr double kAsSteep = 0.95;
    double step_s = 0, lane_s = 0;  // of the groups between both
    for (size_t s = 0; s < of_to.size(); ++s) {
        step_s = std::max(step_s, of_to[s].seconds - of_from[s].seconds);
        for (size_t lane = 0; lane < swap::kLanes; ++lane)
            lane_s = std::max(lane_s, of_to[s].lanes[lane] - of_from[s].lanes[lane]);
    }
    return step_s >= kAsSteep * lane_s;
}

std::optional<ShortSteps> short_steps_of(std::span<const Plan> plans, int64_t most_visits) {
    const int64_t stages = std::ssize(plans), all = passing(plans.front());
    int64_t visits = 0;
    for (const Plan& plan : plans) visits += plan.blocks() * plan.micro_batches;
    const int64_t sets = most_visits * all / std::max<int64_t>(visits, 1) / stages;
    const int64_t from = (std::max<int64_t>(sets, 2) - 1) * stages, to = from + stages;
    if (all <= from + to) return std::nullopt;  // which would take as long
    return ShortSteps{.from = from, .to = to, .all = all, .in_turn = in_turn(plans.front())};
}

std::optional<ShortSteps> steady_steps_of(
    std::span<const Plan> plans, int64_t most_visits,
    const std::function<bool(const ShortSteps&)>& are_steady) {
    int64_t before = 0;
    for (int64_t visits = most_visits;; visits = std::max(2 * visits, kMostVisits)) {
        std::optional<ShortSteps> steps = short_steps_of(plans, visits);
        if (!steps) return steps;
        const bool last = visits >= kMostUnsteadyVisits;
        if (steps->to == before && !last) continue;
        before = steps->to;
        steps->steady = are_steady(*steps);
        if (steps->steady || last) return steps;
    }
}

bool speculate(std::span<const Plan> plans) {
    return std::ranges::all_of(plans, &Plan::speculative);
}

RecordedStages record_stages(std::span<const Plan> plans, bool speculative) {
    const Previous steady = speculative ? Previous::committed : Previous::not_speculative;
    RecordedStages found;
    for (const Plan& plan : plans) {
        found.first.push_back(record_step(plan, Previous::none, speculative));
        found.steady.push_back(record_step(plan, steady, speculative));
    }
    return found;
}

bool covers(std::span<const Plan> plans, const RecordedStages& steps,
            const cost::KernelTimes& times) {
    for (size_t s = 0; s < plans.size(); ++s)
        if (!times.covers(steps.steady[s], planner::work_of(plans[s]))) return false;
    return true;
}

void add_assumed_kernels(std::span<const Plan> plans, const RecordedStages& steps,
                         const model::Decoder& decoder, cost::Measurements& measured) {
    for (size_t s = 0; s < plans.size(); ++s)
        add_assumed_kernels(steps.steady[s], plans[s], decoder, measured);
}

void add_assumed_kernels(const swap::Schedule& step, const Plan& plan,
                         const model::Decoder& decoder, cost::Measurements& measured) {
    const cost::WorkOf work_of = planner::work_of(plan);
    if (measured.kernels.covers(step, work_of)) return;
    const cost::KernelTimes assumed =
        cost::assumed_times(step, work_of, decoder.numerics().tokens(), most_saved_flops(decoder),
                            {measured.assumed_flops_per_s, cost::kAssumedDeviceBytesPerS});
    for (const auto& [kind, seconds] : assumed.seconds)
        measured.kernels.seconds.try_emplace(kind, seconds);
}

namespace {

std::vector<StageStep> simulate_whole(std::span<const Plan> plans, bool speculative,
                                      const model::Decoder& decoder, cost::Measurements measured) {
    const RecordedStages steps = record_stages(plans, speculative);
    add_assumed_kernels(plans, steps, decoder, measured);
    const std::vector<swap::Timeline> timelines =
        predict_stages(plans, steps.first, steps.steady, measured);
    std::vector<StageStep> found;
    for (size_t s = 0; s < plans.size(); ++s)
        found.push_back(
            {.seconds = timelines[s].step_seconds,
             .weight_bytes = static_cast<double>(weight_bytes(plans[s], steps.steady[s])),
             .lanes = timelines[s].busy_seconds});
    return found;
}

std::vector<StageStep> simulate_shortened(std::span<const Plan> plans, int64_t count,
                                          bool speculative, const model::Decoder& decoder,
                                          const cost::Measurements& measured) {
    return simulate_whole(shortened({plans.begin(), plans.end()}, count), speculative, decoder,
                          measured);
}

// A machine on which the stages wait for kernels and for each other alone.
cost::Measurements without_what_comes_once(cost::Measurements measured) {
    constexpr double kAtOnce = 1e18;
    for (cost::GroupRate* rate :
         {&measured.with_sequence, &measured.with_slices, &measured.between_stages})
        if (rate->bytes_per_s == 0) *rate = {cost::comm_rate(measured), measured.comm_overhead_s};
    measured.comm_bytes_per_s = kAtOnce;
    measured.comm_overhead_s = 0;
    measured.in_host = measured.across_hosts = {kAtOnce, 0};
    measured.nvme_bytes_per_s = measured.dram_bytes_per_s = kAtOnce;
    measured.momentum_bytes_per_s = 0;
    measured.update_overhead_s = 0;
    return measured;
}

}  // namespace

std::vector<StageStep> simulate_stages(std::span<const Plan> plans, bool speculative,
                                       const model::Decoder& decoder,
                                       const cost::Measurements& measured, int64_t most_visits) {
    std::vector<StageStep> from, to;
    const auto of = [&](int64_t count) {
        return simulate_shortened(plans, count, speculative, decoder, measured);
    };
    const std::optional<ShortSteps> steps =
        steady_steps_of(plans, most_visits, [&](const ShortSteps& these) {
            from = of(these.from);
            to = of(these.to);
            return these.are_steady(from, to);
        });
    if (!steps) return simulate_whole(plans, speculative, decoder, measured);
    const double seconds =
        seconds_of_long_step(*steps, from, to, plans, speculative, decoder, measured);
    std::vector<StageStep> found;
    for (size_t s = 0; s < plans.size(); ++s) {
        found.push_back({.seconds = seconds,
                         .weight_bytes = steps->at_all(from[s].weight_bytes, to[s].weight_bytes)});
        for (size_t lane = 0; lane < swap::kLanes; ++lane)
            found[s].lanes[lane] = steps->at_all(from[s].lanes[lane], to[s].lanes[lane]);
    }
    return found;
}

double seconds_of_long_step(const ShortSteps& steps, std::span<const StageStep> of_from,
                            std::span<const StageStep> of_to, std::span<const Plan> plans,
                            bool speculative, const model::Decoder& decoder,
                            const cost::Measurements& measured) {
    const double on_line_s = steps.seconds_at_all(of_from, of_to);
    if (!steps.may_hide_waits(of_from, of_to)) return on_line_s;
    const cost::Measurements alone = without_what_comes_once(measured);
    const auto of = [&](int64_t count) {
        return simulate_shortened(plans, count, speculative, decoder, alone);
    };
    return std::max(on_line_s, steps.seconds_at_all(of(steps.from), of(steps.to)));
}

int64_t weight_bytes(const Plan& plan, const swap::Schedule& step) {
    std::vector<bool> is_weight(plan.objects.size());
    for (const planner::Chunk& chunk : plan.chunks)
        if (chunk.weight != swap::kNoObject) is_weight[chunk.weight] = true;
    for (const planner::LayerPlan& layer : plan.layer_plans)
        for (const swap::ObjectId shard : layer.second_shards)
            if (shard != swap::kNoObject) is_weight[shard] = true;
    const auto gathers = [](const swap::Task& task) {
        return task.lane == swap::Lane::comm && cost::row_of(task).gathers_weights;
    };
    int64_t bytes = 0;
    for (const swap::Task& task : step.tasks) {
        const bool copied = task.lane == swap::Lane::h2d && task.object != swap::kNoObject &&
                            is_weight[task.object];
        if (copied || gathers(task)) bytes += task.bytes;
    }
    return bytes;
}

}  // namespace ferry::train
