// What a checkpoint costs a run: how long it is written, and how long training waits for it.
#pragma once

#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <vector>

#include "ferry/config.h"
#include "model/model.h"
#include "planner/planner.h"
#include "prediction_report.h"
#include "train/prediction/predictor.h"

namespace ferry::tools {

struct CheckpointCost {
    int64_t bytes = 0;
    int64_t held = 0;    // of them, in host memory while training goes on, within the budgets
    int64_t stored = 0;  // of them, read from NVMe for it, while training waits
    // None: nothing was measured, or nothing can be written there. Training is slowed by what it
    // waits, and by what the steps meanwhile take longer.
    std::optional<double> write_seconds{}, waited_seconds{}, slowed_seconds{};
};
// None where the run writes none but at its end. With a prediction a few files are written to the
// file system of checkpoint.dir for at most two seconds, and removed.
// `plan` is the first rank's, of so many; `layers`: the whole model's.
std::optional<CheckpointCost> checkpoint_cost(const Config& config, const planner::Plan& plan,
                                              const std::vector<model::Layer>& layers,
                                              const train::RankCount& count,
                                              const PredictionReport* report);
std::string text_of(const CheckpointCost& cost);
nlohmann::json to_json(const CheckpointCost& cost);

}  // namespace ferry::tools
