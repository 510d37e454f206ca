// A configuration translated to the types of other modules.
#pragma once

#include "ferry/config.h"
#include "ferry/dtype.h"
#include "ferry/learning_rate.h"
#include "ferry/optim.h"
#include "planner/request.h"
#include "zero/zero.h"

namespace ferry::train {

// The request of the whole run, as if it were one rank. of_rank() makes a rank's request of it.
planner::PlanRequest request_of(const Config& config);
// The optimizer, where ranks exchange nothing: 1-bit Adam is AdamW. Its learning rate is the
// schedule's peak (schedule_of()).
optim::Hyper hyper_of(const Config& config);
// The same for what is updated element by element. Beside Muon's matrices AdamW does that.
optim::Hyper elements_hyper_of(const Config& config);
StateFormat format_of(const Config& config);
zero::Codecs codecs_of(const Config& config);
zero::Hosts hosts_of(const Config& config);
// The learning rate over the run's updates. Throws usage where its keys contradict each other.
optim::LrSchedule schedule_of(const Config& config);

}  // namespace ferry::train
