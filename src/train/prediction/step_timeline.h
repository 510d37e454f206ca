// Predictions of a plan: what its steps take on a machine, and the lower bound of its
// configuration.
#pragma once

#include <span>
#include <vector>

#include "cost/bound.h"
#include "cost/simulator.h"
#include "train/step/step.h"

namespace ferry::train {

// Steps of that kind one after another, after a first one that had nothing to finish.
swap::Timeline predict_steps(const planner::Plan& plan, const swap::Schedule& first,
                             const swap::Schedule& steady, const cost::Measurements& measured);

// The same of a rank of each stage of a pipeline, with what they wait for each other. `first` and
// `steady`: by stage.
std::vector<swap::Timeline> predict_stages(std::span<const planner::Plan> plans,
                                           std::span<const swap::Schedule> first,
                                           std::span<const swap::Schedule> steady,
                                           const cost::Measurements& measured);

// `step` is the steady step that exchanges gradients, or the one that exchanges momentum. A local
// step leaves the state as it is and has no bound. Host memory and drives are the budgets'. Of the
// device's memory it counts what the kernels' buffers leave.
cost::Bound bound_of(const BudgetConfig& budgets, const planner::Plan& plan,
                     const model::Shape& shape, const swap::Schedule& step,
                     const cost::Measurements& measured,
                     Exchanged exchanged = Exchanged::gradients);

// The same of kernels that reach the machine's peaks: products the rate of a large one, all else
// that of a copy within the device's memory. 0 s: a peak is not known.
cost::Bound bound_by_peaks(const BudgetConfig& budgets, const planner::Plan& plan,
                           const model::Decoder& decoder, const swap::Schedule& step,
                           cost::Measurements measured, Exchanged exchanged = Exchanged::gradients);

}  // namespace ferry::train
