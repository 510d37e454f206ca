// A configuration translated to the types of other modules.
#pragma once

#include "ferry/config.h"
#include "ferry/dtype.h"
#include "ferry/optim.h"
#include "planner/request.h"

namespace ferry::train {

// The request of the whole run, as if it were one rank: a rank's is of_rank() of it.
planner::PlanRequest request_of(const Config& config);
// The optimizer; its learning rate is the schedule's peak (schedule_of() in ferry/train.h).
optim::Hyper hyper_of(const Config& config);
StateFormat format_of(const Config& config);

}  // namespace ferry::train
