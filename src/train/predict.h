// What the tasks of a step take on this machine, so that swap::predict can say what the step takes;
// and the lower bound of a plan's configuration.
#pragma once

#include "bound.h"
#include "step.h"
#include "train/forecast.h"

namespace ferry::train {

// An update of the optimizer, on the host or, on the compute lane, on the device.
bool is_update(const swap::Task& task);
// What it reads and writes of the memory it runs on; 0 of any other task.
double bytes_of_update(const planner::Plan& plan, const swap::Task& task);

// Kernels and updates take all cores, copies and checks one each; reads and writes share the disk.
// Updates take all of the memory's bandwidth, as they do alone, and whatever else goes through it
// its own rate's part: beside a GPU's copies both get slower.
swap::CostModel cost_model(const planner::Plan& plan, const KernelTimes& kernels,
                           const Machine& machine);

// Steps of that kind one after another, after a first one that had nothing to finish.
swap::Timeline predict_steps(const planner::Plan& plan, const swap::Schedule& first,
                             const swap::Schedule& steady, const Figures& figures);

// `step` is the steady one. The host memory and the drives are the budgets'; of the device's memory
// that which the kernels' buffers leave.
Bound bound_of(const BudgetConfig& budgets, const planner::Plan& plan, const model::Shape& shape,
               const swap::Schedule& step, const Figures& figures);

}  // namespace ferry::train
