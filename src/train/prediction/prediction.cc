#include "prediction.h"

#include <spdlog/fmt/fmt.h>

#include <algorithm>
#include <string>
#include <vector>

#include "base/log.h"
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

std::string groups_text(const Plan& plan) {
    return fmt::format("{} group{} of {} micro-batch{}", plan.groups, plan.groups == 1 ? "" : "s",
                       plan.group_size(), plan.group_size() == 1 ? "" : "es");
}

void warn_of_bubble(const Plan& plan) {
    const zero::Stage& stage = plan.partition.stage;
    const bool in_turn = stage.round_robin;
    const int64_t passing = in_turn ? plan.micro_batches : plan.groups;
    if (passing >= stage.count) return;
    const std::string what =
        in_turn ? fmt::format("{} micro-batch{} in round robin", passing, passing == 1 ? "" : "es")
                : groups_text(plan);
    log_warn(fmt::format(
        "{} for {} stages: by theory each waits {:.0f} % of a step where all are as fast; raise "
        "batch.micro_batches{}, or lower parallel.pipeline",
        what, stage.count, 100 * bubble_of(plan),
        plan.group_size() > 1 && !in_turn ? " or swap.groups" : ""));
}

std::vector<ScheduleBytes> schedule_bytes(const Plan& plan) {
    std::vector<ScheduleBytes> all;
    const auto add = [&](Previous previous, bool speculative, Exchanged what) {
        const std::string name = name_of_step(previous, speculative, what);
        all.push_back({name, what, step_bytes(plan, previous, speculative, what)});
        if (!speculative) all.push_back({"end " + name, what, drain_bytes(plan, previous, what)});
    };
    for (int p = 0; p < kPrevious; ++p) {
        const auto previous = static_cast<Previous>(p);
        if (previous == Previous::alone) continue;  // only momentum comes after it
        for (const bool speculative : {false, true})
            if (!speculative || plan.speculative) add(previous, speculative, Exchanged::gradients);
    }
    if (!plan.has_feedback()) return all;
    for (const Previous previous : {Previous::none, Previous::not_speculative, Previous::alone})
        if (previous != Previous::alone || plan.partition.codecs.local_steps)
            add(previous, false, Exchanged::momentum);
    return all;
}

ScheduleBytes steady_bytes(const Plan& plan, zero::Exchanged what) {
    const Previous previous =
        what == zero::Exchanged::nothing ? Previous::alone : Previous::not_speculative;
    return {name_of_step(previous, false, what), what, step_bytes(plan, previous, false, what)};
}

}  // namespace ferry::train
