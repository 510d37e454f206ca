// The sizes of a plan's kernels, for the functions of their operations' rows.
#pragma once

#include "cost/kernel_times.h"
#include "planner/planner.h"
#include "swap/schedule.h"

namespace ferry::planner {

// As a row's functions count it, but for what the device multiplies to give what blocks may save.
cost::Work work_of(const Plan& plan, const swap::Task& task);
// Gives the work of any of the plan's kernels; the plan must outlive it.
cost::WorkOf work_of(const Plan& plan);

}  // namespace ferry::planner
