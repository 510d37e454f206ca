// What a user should know of the hosts that a plan's ranks are on.
#pragma once

#include "ferry/config.h"
#include "planner/planner.h"
#include "train/prediction/predictor.h"

namespace ferry::tools {

// Warns of groups whose ranks are not on one host, and of hosts that the configuration cuts
// otherwise than the plan.
void warn_of_hosts(const planner::Plan& plan, const Config& config, const train::RankCount& count);

}  // namespace ferry::tools
