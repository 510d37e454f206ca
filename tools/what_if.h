// What one more unit of each resource would buy, and knowing that no step is clipped: the plan made
// and forecast once more with it.
#pragma once

#include <string>
#include <vector>

#include "train/forecast.h"

namespace ferry::tools {

struct WhatIf {
    std::string change{};  // "+1 GiB of host memory", "swap.expect_clipped=0"
    double step_seconds = 0;
};

// Only of resources that are limited, for more of what a budget does not name buys nothing, and of
// clipping where it changes the plan.
std::vector<WhatIf> what_if(const Config& config, const train::Forecaster& forecaster,
                            const planner::Plan& plan, const train::Figures& figures);

}  // namespace ferry::tools
