// What other modules take from a configuration, in their own words.
#pragma once

#include "ferry/aio.h"
#include "ferry/config.h"
#include "planner/request.h"

namespace ferry::train {

// Of the whole run, as if it were one rank: a rank's is of_rank() of it.
planner::PlanRequest request_of(const Config& config);
aio::BackendKind backend_of(IoBackend backend);

}  // namespace ferry::train
