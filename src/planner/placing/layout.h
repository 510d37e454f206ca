// Turns a placement into objects, slots and addresses.
#pragma once

#include "placement.h"

namespace ferry::planner {

// Completes a plan whose layers, layer_plans and chunks are set. Throws does_not_fit when the NVMe
// paths are too small.
void lay_out(Plan& plan, const Placement& placement, const Workload& work, Budget nvme,
             size_t paths);

}  // namespace ferry::planner
