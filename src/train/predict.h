// What the tasks of a step take on this machine, so that swap::predict can say what the step takes.
#pragma once

#include "bound.h"
#include "measure.h"

namespace ferry::train {

struct Machine {
    LinkSpeeds links{};
    double check_bytes_per_s = 0;  // of one thread
    int threads = 1;               // of the team
    bool computes_on_host = true;  // kernels and copies take the team's cores
};

// Kernels and updates take all cores, copies and checks one each; reads and writes share the disk.
swap::CostModel cost_model(const planner::Plan& plan, const KernelTimes& kernels,
                           const Machine& machine);

}  // namespace ferry::train
