// The prediction of a step as `ferry plan` prints it.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "tools/machine/find_measurements.h"
#include "what_if.h"

namespace ferry::tools {

struct PredictionReport {
    train::Prediction prediction{};
    FoundMeasurements found{};
    cost::Measurements in_a_host{};  // the same before a network was put between hosts
    std::vector<WhatIf> what_if{};
};

std::string text_of(const PredictionReport& report);
nlohmann::json to_json(const PredictionReport& report);
// Bytes that a schedule moves on each lane, and those of each schedule.
nlohmann::json lanes_json(const train::ScheduleBytes& schedule, int ranks);
nlohmann::json schedules_json(const std::vector<train::ScheduleBytes>& schedules, int ranks);

}  // namespace ferry::tools
