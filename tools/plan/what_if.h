// The gain of one more unit of each resource, and of knowing that no step is clipped. The plan is
// made, and its step predicted, once more with each.
#pragma once

#include <string>
#include <vector>

#include "train/prediction/predictor.h"

namespace ferry::tools {

struct WhatIf {
    std::string change{};  // "+1 GiB of host memory", "swap.expect_clipped=0"
    double step_seconds = 0;
    bool all_in_memory = false;  // where the plan needs a disk: nothing is on one any more
};

// Whether the configuration may ask for a split master, and for int8 moments, with all else as it
// is.
bool may_split(const Config& config);
bool may_code(const Config& config);

// Only of resources that are limited, as more of an unlimited one buys nothing, and of clipping
// where it changes the plan.
std::vector<WhatIf> what_if(const Config& config, const train::Predictor& predictor,
                            const planner::Plan& plan, const cost::Measurements& measurements);

}  // namespace ferry::tools
