// What a run writes to its drives, and how much of their lives that is.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "ferry/config.h"
#include "ferry/forecast.h"

namespace ferry::tools {

struct PathWear {
    std::string path{};
    double run_bytes = 0;
    double share = 0;  // of endurance_tbw; 0: unknown
};

struct Wear {
    int64_t step_bytes = 0;
    double run_bytes = 0;  // layout and first contents, then every step
    std::vector<PathWear> paths{};
    std::vector<std::string> advice{};  // where a drive loses more than a tenth of its life
};

// `path_shares`: of what is stored, on each path; empty where that is not known: all alike.
Wear wear_of(const Config& config, const planner::Plan& plan,
             const std::vector<train::ScheduleBytes>& schedules,
             const std::vector<double>& path_shares);
std::string text_of(const Wear& wear, const Config& config);
nlohmann::json to_json(const Wear& wear);

}  // namespace ferry::tools
