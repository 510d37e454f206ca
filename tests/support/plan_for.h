// The plan of a run on one rank.
#pragma once

#include "train/prediction/predictor.h"
#include "train/setup/from_config.h"

namespace ferry::train {

// The one that Engine::make would work by; touches neither tokens nor disks. Throws Error.
inline planner::Plan plan_for(const Config& config) {
    return Predictor::make(config)->plan(request_of(config));
}

}  // namespace ferry::train
