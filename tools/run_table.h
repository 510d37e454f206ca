// What `ferry train` prints before and after a run.
#pragma once

#include <nlohmann/json.hpp>

#include "ferry/config.h"
#include "ferry/train.h"

namespace ferry::tools {

void print_plan(const planner::Plan& plan, const Config& config);
void print_run(const train::RunReport& report, const planner::Plan& plan, const Config& config);
nlohmann::json summary_json(const train::RunReport& report, const planner::Plan& plan);

}  // namespace ferry::tools
