#include "prediction.h"

#include <algorithm>
#include <string>
#include <vector>

#include "planner/planner.h"
#include "train/setup/stages.h"
#include "train/step/step.h"
#include "zero/zero.h"

namespace ferry::train {

using planner::Plan;

const LinkPrediction& Prediction::binding() const {
    return *std::max_element(links.begin(), links.end(),
                             [](const auto& a, const auto& b) { return a.seconds < b.seconds; });
}

double bubble_of(const Plan& plan) {
    const zero::Stage& stage = plan.partition.stage;
    return bubble_of(plan.groups, stage.count, plan.group_size(), plan.blocks(),
                     stage.splits_backward, stage.virtual_stages());
}

std::vector<ScheduleBytes> schedule_bytes(const Plan& plan) {
    std::vector<ScheduleBytes> all;
    for (int p = 0; p < kPrevious; ++p) {
        const auto previous = static_cast<Previous>(p);
        for (const bool speculative : {false, true}) {
            if (speculative && !plan.speculative) continue;
            const std::string name = name_of_step(previous, speculative);
            all.push_back({name, step_bytes(plan, previous, speculative)});
            if (!speculative) all.push_back({"end " + name, drain_bytes(plan, previous)});
        }
    }
    return all;
}

ScheduleBytes steady_bytes(const Plan& plan, zero::Exchanged what) {
    const Previous previous =
        what == zero::Exchanged::nothing ? Previous::alone : Previous::not_speculative;
    return {name_of_step(previous, false), step_bytes(plan, previous, false, what)};
}

}  // namespace ferry::train
