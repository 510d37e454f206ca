// What one more unit of each resource would buy: the plan made and forecast once more with it.
#pragma once

#include <string>
#include <vector>

#include "ferry/forecast.h"

namespace ferry::tools {

struct WhatIf {
    std::string change{};  // "+1 GiB of host memory"
    double step_seconds = 0;
};

// Only of resources that are limited: more of what a budget does not name buys nothing.
std::vector<WhatIf> what_if(const Config& config, const train::Forecaster& forecaster,
                            const planner::Plan& plan, const train::Figures& figures);

}  // namespace ferry::tools
