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

// `step` is the steady one of those that exchange gradients, or of those that exchange momentum: a
// local step, which leaves the state as it is, has no bound. The host memory and the drives are the
// budgets'; of the device's memory that which the kernels' buffers leave.
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
