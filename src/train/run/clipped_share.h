// How often a run is clipped, beside what its plan was made for (swap.expect_clipped).
#pragma once

#include <functional>
#include <string>

#include "ferry/train.h"
#include "rank_planner.h"
#include "train/prediction/predictor.h"

namespace ferry::train {

// The predicted seconds of a step whose speculative updates are committed, and of one among those
// without speculative updates.
struct StepKinds {
    double committed = 0, not_speculative = 0;  // seconds
    // The mean over steps of which this share (0 to 1) is clipped.
    double mean(double clipped) const {
        return (1 - clipped) * committed + clipped * not_speculative;
    }
};
StepKinds predict_kinds(const planner::Plan& plan, const cost::Measurements& measured);

// In words, what a plan made for as many clipped steps as `run` had would have saved. Empty where
// that is under 2 %, where nothing speculates or no such plan can be made, and of fewer than 20
// steps, for the first ones are clipped more often. `expecting` makes the plan for a share of
// clipped steps, or throws Error.
std::string saved_by_expecting(const RunReport& run, const planner::Plan& plan,
                               const std::function<planner::Plan(double clipped)>& expecting,
                               const cost::Measurements& measured);

// Says so, of a run whose plan `planner` made.
void log_clipped_otherwise(const RunReport& run, const planner::Plan& plan,
                           const RankPlanner& planner, const cost::Measurements& measured);

}  // namespace ferry::train
