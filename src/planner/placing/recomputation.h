// Chooses what backward computes again, and what stays on the device so that it need not.
#pragma once

#include <vector>

#include "placement.h"

namespace ferry::planner {

// Saves what the user asks for, else what makes the step shortest. It chooses the number of groups
// likewise.
Placement place_for_speed(const PlanRequest& request, const Workload& work,
                          const std::vector<Chunk>& chunks,
                          const std::vector<AccumulatorSpill>& spills,
                          const cost::Measurements& machine);

}  // namespace ferry::planner
