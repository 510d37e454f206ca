// The stages of a pipeline that is planned: what a rank of each has, sends and waits.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "planner/planner.h"
#include "train/prediction/predictor.h"

namespace ferry::tools {

// Of a plan of each stage; nothing of one. `prediction` may be null. `choice`: how their schedule
// was chosen, where the configuration leaves that to ferry.
std::string pipeline_text(const std::vector<planner::Plan>& plans,
                          const train::Prediction* prediction, const train::ScheduleChoice& choice);
nlohmann::json pipeline_json(const std::vector<planner::Plan>& plans,
                             const train::Prediction* prediction,
                             const train::ScheduleChoice& choice);

}  // namespace ferry::tools
