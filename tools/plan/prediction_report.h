// The prediction of a step as `ferry plan` prints it.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "tools/machine/find_measurements.h"
#include "what_if.h"

namespace ferry::tools {

struct PredictionReport {
    train::Prediction prediction{};
    FoundMeasurements found{};
    std::vector<WhatIf> what_if{};
};

std::string text_of(const PredictionReport& report);
nlohmann::json to_json(const PredictionReport& report);
// Bytes that each schedule moves on each lane.
nlohmann::json schedules_json(const std::vector<train::ScheduleBytes>& schedules, int ranks);

}  // namespace ferry::tools
