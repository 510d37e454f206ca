// The steps of all stages of a pipeline, simulated together.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "cost/measurements.h"
#include "model/model.h"
#include "planner/planner.h"
#include "swap/schedule.h"
#include "zero/zero.h"

namespace ferry::train {

// A rank's plan for each stage, all in the chunks of the tightest, as ranks agree on them.
// `plan_of`: of a stage, in such chunks or, with none, in those that it chooses itself.
template <class PlanOf>
std::vector<planner::Plan> plans_of_stages(std::span<const zero::Stage> stages,
                                           const PlanOf& plan_of) {
    std::vector<planner::Plan> found;
    for (const zero::Stage& stage : stages) found.push_back(plan_of(stage, std::nullopt));
    const std::optional<int64_t> chunk =
        std::ranges::min_element(found, {}, &planner::Plan::chunk_elements)->chunk_elements;
    for (size_t s = 0; s < found.size(); ++s)
        if (found[s].chunk_elements != chunk) found[s] = plan_of(stages[s], chunk);
    return found;
}

// A step among its like, by stage; `first` is the one before them. Speculative where `speculative`,
// which every plan must be then.
struct RecordedStages {
    std::vector<swap::Schedule> first{}, steady{};
};
RecordedStages record_stages(std::span<const planner::Plan> plans, bool speculative);
// Whether these times have a kernel of every kind that the steps need.
bool covers(std::span<const planner::Plan> plans, const RecordedStages& steps,
            const cost::KernelTimes& times);
// Adds what `measured`, which is one rank's, does not cover: by arithmetic.
void add_assumed_kernels(std::span<const planner::Plan> plans, const RecordedStages& steps,
                         const model::Decoder& decoder, cost::Measurements& measured);
// The same for one schedule.
void add_assumed_kernels(const swap::Schedule& step, const planner::Plan& plan,
                         const model::Decoder& decoder, cost::Measurements& measured);
// Bytes of weights that come to the device in a step, from its host's memory or from other ranks.
int64_t weight_bytes(const planner::Plan& plan, const swap::Schedule& step);

}  // namespace ferry::train
