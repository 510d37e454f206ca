// Whether a plan fits into what this machine has left.
#pragma once

#include "ferry/config.h"
#include "ferry/device.h"
#include "planner/planner.h"
#include "topology/topology.h"

namespace ferry::train {

// Refuses a plan that takes more memory than the machine or cgroup has left, as the kernel would
// kill the run later. `budgets` are this rank's, here as below. `beside`: bytes that it takes for a
// while beside the plan.
planner::Plan within_memory(planner::Plan plan, const BudgetConfig& budgets,
                            const Topology& machine, const Device& device, int64_t beside = 0);
// The same refusal, without a warning of paths that are memory themselves.
void require_memory(const planner::Plan& plan, const BudgetConfig& budgets, const Topology& machine,
                    const Device& device, int64_t beside = 0);
// What checkpoints of this configuration take beside the plan while they are written.
int64_t memory_to_save(const Config& config);
// Bytes that are left beside those, to read ahead before the first step.
int64_t memory_for_reading(const planner::Plan& plan, const BudgetConfig& budgets,
                           const Topology& machine, const Device& device);
// Bytes that the run may take beside its plan, within budgets.host and within what the machine has
// left. A part of the machine's memory stays free for pages of files.
int64_t memory_beside(const planner::Plan& plan, const BudgetConfig& budgets,
                      const Topology& machine, const Device& device);
// The machine with the memory that can be taken now and given back soon. It is what is left beside
// the run's further needs, and no more than `of_budget`.
Topology as_left_now(Topology machine, int64_t of_budget);
// What budgets.host has left beside so many bytes that were reserved of it.
int64_t left_of_budget(const BudgetConfig& budgets, int64_t reserved);

}  // namespace ferry::train
