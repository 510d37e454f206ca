// What is predicted of a plan's step, and the bytes that its schedules move.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "cost/bound.h"
#include "model/saved_activations.h"
#include "planner/planner.h"
#include "simulated_stages.h"
#include "swap/schedule.h"
#include "zero/zero.h"

namespace ferry::train {

// A link of a plan: the bytes that a step moves over it, and the seconds that this takes alone.
struct LinkPrediction {
    cost::Link link = cost::Link::compute;
    int64_t bytes = 0;
    double seconds = 0;
};

// Shares of state, and of the gradients that wait with it, on each tier.
struct StateShares {
    double device = 0, host = 0, nvme = 0;
};

// What a rank of one stage of a pipeline has and does in a step.
struct StagePrediction {
    zero::Stage stage{};
    int64_t blocks = 0;
    int64_t device_bytes = 0, host_bytes = 0, nvme_bytes = 0;
    // Bytes sent: to the next stage, to the one before, of a tied table, to ranks of its own stage.
    int64_t to_next = 0, to_previous = 0, of_table = 0, to_sharers = 0;
    int64_t weights_up = 0;  // of weights that stream to the device
    int64_t accumulators_down = 0, accumulators_up = 0;
    double compute_seconds = 0;  // that its kernels run
    double waits = 0;            // the rest of the step, a part of it
    swap::Schedule schedule{};   // of a long step the longer one of the short steps
    swap::Timeline timeline{};
};

struct Prediction {
    double step_seconds = 0;    // the prediction
    swap::Schedule schedule{};  // a step's, with steps before and after it; of stages the longest's
    swap::Timeline timeline{};
    // A long step: schedules and timelines, here and of the stages, are those of the longer of the
    // short steps. All else is the whole step's.
    std::optional<ShortSteps> by{};
    bool speculative = false;  // speculative updates that are committed; else none
    std::vector<LinkPrediction> links{};
    // The lower bound over all placements that the budgets allow, and the link that sets it.
    double bound_seconds = 0;
    cost::Link bound_link = cost::Link::compute;
    double peak_bound_seconds = 0;   // the same of kernels at the machine's peaks; 0: not known
    StateShares planned{}, bound{};  // where the plan has them, and where the bound would
    // How many of the blocks that backward visits save each activation for it.
    model::OfSaved<double> planned_saved{}, bound_saved{};
    std::vector<StagePrediction> stages{};  // of a pipeline, in their order
    size_t shown = 0;                       // which of them is the longest
    const LinkPrediction& binding() const;  // the link that takes longest: the plan's own bound
};

// The share of a step that a stage of the plan's pipeline waits, where all stages take equally
// long. 0: there is no pipeline.
double bubble_of(const planner::Plan& plan);

// "4 groups of 2 micro-batches"
std::string groups_text(const planner::Plan& plan);
// Warns, with the bubble in theory, where fewer groups pass through the stages than there are
// stages. In round robin stages take micro-batches in turn, so those are counted.
void warn_of_bubble(const planner::Plan& plan);

// Bytes that a schedule moves on each lane, exactly.
struct ScheduleBytes {
    std::string name{};
    // Of steps of momentum: those that exchange it, and local steps, which replay the same.
    zero::Exchanged exchanged = zero::Exchanged::gradients;
    std::array<int64_t, swap::kLanes> bytes{};
};
// Every schedule that a run of this plan may replay: its steps, and what ends it or leads over
// from gradients to momentum and back.
std::vector<ScheduleBytes> schedule_bytes(const planner::Plan& plan);
// Of a step without speculative updates among its like.
ScheduleBytes steady_bytes(const planner::Plan& plan,
                           zero::Exchanged what = zero::Exchanged::gradients);

}  // namespace ferry::train
