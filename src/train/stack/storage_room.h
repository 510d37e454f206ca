// Whether the storage paths have room for a plan, asked before any memory is taken for it.
#pragma once

#include "ferry/config.h"
#include "planner/planner.h"

namespace ferry::train {

// Throws does_not_fit where the paths have too little free space for it. Looks, and
// writes nothing: opening the volume decides, which also knows of alignment and of other processes.
void require_room(const planner::Plan& plan, const std::vector<NvmePath>& paths);

}  // namespace ferry::train
