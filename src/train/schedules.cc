#include "schedules.h"

#include <algorithm>

#include "ferry/error.h"

namespace ferry::train {

std::vector<std::array<int64_t, 3>> exchanges_of(const swap::Schedule& schedule, bool in_kernels) {
    std::vector<std::array<int64_t, 3>> found;
    for (const uint32_t index : schedule.lanes[static_cast<size_t>(swap::Lane::comm)]) {
        const swap::Task& task = schedule.tasks[index];
        found.push_back({task.op, task.layer, task.bytes});
    }
    if (!in_kernels) return found;
    for (const uint32_t index : schedule.lanes[static_cast<size_t>(swap::Lane::compute)]) {
        const swap::Task& task = schedule.tasks[index];
        const auto op = static_cast<cost::Op>(task.op);
        if (op == cost::Op::forward || op == cost::Op::backward)
            found.push_back({task.op, task.layer, task.item});
    }
    return found;
}

void Schedules::record(const planner::Plan& plan, int64_t evaluated_micro_batches) {
    for (size_t p = 0; p < kPrevious; ++p) {
        const auto previous = static_cast<Previous>(p);
        if (previous == Previous::alone) continue;
        steps[p][0] = record_step(plan, previous, false);
        if (plan.speculative) {
            steps[p][1] = record_step(plan, previous, true);
            // Ranks compare the steps without speculative updates: not all of them need make any.
            FERRY_CHECK(exchanges_of(steps[p][0]) == exchanges_of(steps[p][1]),
                        "a speculative update changes nothing that ranks exchange");
        }
        drains[p] = record_drain(plan, previous);
    }
    record_by_momentum(plan);
    evaluation_size = std::min(plan.group_size(), std::max<int64_t>(evaluated_micro_batches, 1));
    while (evaluated_micro_batches % evaluation_size != 0) --evaluation_size;
    evaluation = record_evaluation(plan, evaluation_size);
}

void Schedules::record_by_momentum(const planner::Plan& plan) {
    if (!plan.has_feedback()) return;
    for (const Previous previous : {Previous::none, Previous::not_speculative, Previous::alone}) {
        if (previous == Previous::alone && !plan.partition.codecs.local_steps) continue;
        const auto p = static_cast<size_t>(previous);
        steps_by_momentum[p] = record_step(plan, previous, false, Exchanged::momentum);
        if (previous != Previous::none)
            drains_by_momentum[p] = record_drain(plan, previous, Exchanged::momentum);
    }
}

std::vector<const swap::Schedule*> Schedules::all() const {
    std::vector<const swap::Schedule*> found{&evaluation};
    for (const auto& step : steps) found.push_back(step.data());
    for (const swap::Schedule& drain : drains) found.push_back(&drain);
    for (const auto& step : steps_by_momentum) found.push_back(&step);
    for (const swap::Schedule& drain : drains_by_momentum) found.push_back(&drain);
    return found;
}

}  // namespace ferry::train
