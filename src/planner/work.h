// The sizes of a plan's kernels, as the functions of cost::OperationRow take them.
#pragma once

#include "cost/kernel_times.h"
#include "planner/planner.h"
#include "swap/schedule.h"

namespace ferry::planner {

// As a row's functions count it, but for what the device multiplies to give what blocks may save.
cost::Work work_of(const Plan& plan, const swap::Task& task);
// Gives the sizes of any of the plan's kernels. The plan must outlive it.
cost::WorkOf work_of(const Plan& plan);

}  // namespace ferry::planner
