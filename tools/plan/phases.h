// The steps of a run by what its ranks exchange in them. 1-bit and 0/1 Adam have several kinds, all
// others one.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <vector>

#include "train/prediction/predictor.h"

namespace ferry::tools {

struct Phase {
    zero::Exchanged exchanges = zero::Exchanged::gradients;
    int64_t steps = 0;                // of the run's, where none is skipped
    train::ScheduleBytes bytes{};     // of one among its like, without speculative updates
    std::optional<double> seconds{};  // of one among its like; none: not predicted
};
// Those that the run has, gradients first. What leads over from one to another is in none.
std::vector<Phase> phases_of(const Config& config, const planner::Plan& plan);
// Their seconds. `gradients`: what is predicted of a step that exchanges them.
void predict(std::vector<Phase>& phases, double gradients, const Config& config,
             const train::Predictor& predictor, const planner::Plan& plan,
             const cost::Measurements& measured);
// Of the run's steps, each as often as it comes; none: not predicted.
std::optional<double> mean_seconds(const std::vector<Phase>& phases);

std::string text_of(const std::vector<Phase>& phases);  // nothing where there is one
nlohmann::json to_json(const std::vector<Phase>& phases, int ranks);

}  // namespace ferry::tools
