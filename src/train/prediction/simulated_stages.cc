#include "simulated_stages.h"

#include "cost/kernel_times.h"
#include "cost/operations.h"
#include "planner/work.h"
#include "train/stack/device_needs.h"
#include "train/step/step.h"

namespace ferry::train {

using planner::Plan;

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
