// Chooses what backward computes again, and what stays on the device so that it need not.
#pragma once

#include <vector>

#include "placement.h"

namespace ferry::planner {

// Saves as much as is asked for, or as makes the step shortest, in as many groups.
Placement place_for_speed(const PlanRequest& request, const Workload& work,
                          const std::vector<Chunk>& chunks,
                          const std::vector<AccumulatorSpill>& spills,
                          const cost::Measurements& machine);

}  // namespace ferry::planner
