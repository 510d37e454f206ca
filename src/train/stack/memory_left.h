// Whether a plan fits into what this machine has left.
#pragma once

#include "ferry/config.h"
#include "ferry/device.h"
#include "planner/planner.h"
#include "topology/topology.h"

namespace ferry::train {

// Refuses a plan that takes more memory than the machine or cgroup has left: the kernel would kill
// the run later. `budgets`: of this rank, as of all below. `beside`: what it takes for a while
// beside the plan.
planner::Plan within_memory(planner::Plan plan, const BudgetConfig& budgets,
                            const Topology& machine, const Device& device, int64_t beside = 0);
// The same refusal, without a warning of paths that are memory themselves.
void require_memory(const planner::Plan& plan, const BudgetConfig& budgets, const Topology& machine,
                    const Device& device, int64_t beside = 0);
// What checkpoints of this configuration take beside the plan while they are written.
int64_t memory_to_save(const Config& config);
// What is then still left, for what is read ahead before the first step.
int64_t memory_for_reading(const planner::Plan& plan, const BudgetConfig& budgets,
                           const Topology& machine, const Device& device);
// The memory that the run may take beside its plan, within budgets.host and what the machine has
// left. A part of the machine's stays free for pages of files.
int64_t memory_beside(const planner::Plan& plan, const BudgetConfig& budgets,
                      const Topology& machine, const Device& device);
// The machine with what is left of its memory by now, beside what the run still needs, and no more
// than `of_budget`: for what is taken for a while and given back.
Topology as_left_now(Topology machine, int64_t of_budget);
// What budgets.host has left beside so many bytes that were reserved of it.
int64_t left_of_budget(const BudgetConfig& budgets, int64_t reserved);

}  // namespace ferry::train
