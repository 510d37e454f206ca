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

double ShortSteps::at_all(double of_from, double of_to) const {
    return of_to +
           (of_to - of_from) * static_cast<double>(all - to) / static_cast<double>(to - from);
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
             .busy_seconds = timelines[s].busy_seconds[static_cast<size_t>(swap::Lane::compute)],
             .weight_bytes = static_cast<double>(weight_bytes(plans[s], steps.steady[s]))});
    return found;
}

}  // namespace

std::vector<StageStep> simulate_stages(std::span<const Plan> plans, bool speculative,
                                       const model::Decoder& decoder,
                                       const cost::Measurements& measured, int64_t most_visits) {
    const std::optional<ShortSteps> steps = short_steps_of(plans, most_visits);
    if (!steps) return simulate_whole(plans, speculative, decoder, measured);
    const auto of = [&](int64_t count) {
        return simulate_whole(shortened({plans.begin(), plans.end()}, count), speculative, decoder,
                              measured);
    };
    const std::vector<StageStep> from = of(steps->from), to = of(steps->to);
    std::vector<StageStep> found;
    for (size_t s = 0; s < plans.size(); ++s)
        found.push_back({.seconds = steps->at_all(from[s].seconds, to[s].seconds),
                         .busy_seconds = steps->at_all(from[s].busy_seconds, to[s].busy_seconds),
                         .weight_bytes = steps->at_all(from[s].weight_bytes, to[s].weight_bytes)});
    return found;
}

int64_t weight_bytes(const Plan& plan, const swap::Schedule& step) {
    std::vector<bool> is_weight(plan.objects.size());
    for (const planner::Chunk& chunk : plan.chunks)
        if (chunk.weight != swap::kNoObject) is_weight[chunk.weight] = true;
    for (const planner::LayerPlan& layer : plan.layer_plans)
        for (const swap::ObjectId shard : layer.second_shards)
            if (shard != swap::kNoObject) is_weight[shard] = true;
    const auto gathers = [](const swap::Task& task) {
        if (task.lane != swap::Lane::comm) return false;
        const auto op = static_cast<cost::Op>(task.op);
        return op == cost::Op::gather_weights || op == cost::Op::gather_weights_in_host ||
               op == cost::Op::gather_codes || op == cost::Op::gather_codes_in_host;
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
