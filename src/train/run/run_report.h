// Fills a run's report: what its lanes moved, and what its steps should have taken.
#pragma once

#include <array>
#include <span>
#include <vector>

#include "cost/measurements.h"
#include "ferry/config.h"
#include "ferry/train.h"
#include "model/model.h"
#include "planner/planner.h"
#include "rank_lane.h"
#include "swap/store.h"
#include "train/step/schedules.h"

namespace ferry::train {

// The steps' timelines, as measurements of the machine predict them.
using Timelines = std::array<std::array<swap::Timeline, 2>, kPrevious>;
Timelines predict_all(const Schedules& schedules, const planner::Plan& plan,
                      const cost::Measurements& measured);

// Adds what each lane has moved since the store's report was reset, and how long it took.
void add_links(std::vector<LinkReport>& links, const swap::Store& store, int ranks);
void add_collectives(std::vector<CollectiveReport>& collectives,
                     const std::vector<CollectiveReport>& more);

// A step's, by its kind; 0: no such step. The last two exchange momentum, or nothing.
struct PredictedSeconds {
    double plain = 0, speculative = 0;
    double momentum = 0, local = 0;
};
PredictedSeconds seconds_of(const Timelines& planned);
// Adds those that exchange momentum or nothing, where the run has such. Kernels that `measured`
// lacks are taken by arithmetic.
void add_momentum(PredictedSeconds& seconds, const Schedules& schedules, const planner::Plan& plan,
                  const model::Decoder& decoder, cost::Measurements measured);
// The same of the stages of a pipeline together. `plans`: of each stage. Kernels that `measured`
// lacks are taken by arithmetic.
PredictedSeconds seconds_of_stages(std::span<const planner::Plan> plans,
                                   const model::Decoder& decoder,
                                   const cost::Measurements& measured);

// Notes the predicted seconds, and the bounds where they are lower than those that are known. Steps
// of a run that exchanges gradients in some and momentum in others have no bound in common.
void note_predicted(RunReport& report, const PredictedSeconds& seconds, const BudgetConfig& budgets,
                    const planner::Plan& plan, const model::Decoder& decoder,
                    const Schedules& schedules, const cost::Measurements& measured);

}  // namespace ferry::train
