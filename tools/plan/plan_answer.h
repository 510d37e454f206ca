// All that `ferry plan` says of a configuration, as text and as JSON.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <vector>

#include "checkpoint_cost.h"
#include "network.h"
#include "ops/slow_paths.h"
#include "phases.h"
#include "plan_options.h"
#include "planner/planner.h"
#include "prediction_report.h"
#include "train/prediction/config_facts.h"
#include "wear.h"

namespace ferry::tools {

struct Answer {
    std::vector<planner::Plan> plans{};  // of each stage
    std::string planned_by{};
    bool tokens_checked = false;
    std::optional<train::PatternShare> pattern{};
    std::optional<std::vector<ops::SlowPath>> slow{};
    std::optional<PredictionReport> report{};
    std::vector<Phase> phases{};
    std::optional<NetworkReport> over_network{};
    std::optional<CheckpointCost> checkpoint{};
    Wear wear{};
    int64_t longest = 0;
    const planner::Plan& plan() const { return plans.front(); }
    // Of the whole configuration; null: not known.
    const train::Prediction* step() const {
        return report && report->found.missing.empty() ? &report->prediction : nullptr;
    }
};

void print_text(const PlanOptions& options, const Config& config, const Answer& answer,
                const train::Predictor& predictor);
nlohmann::json json_of(const PlanOptions& options, const Config& config, const Answer& answer,
                       const train::Predictor& predictor);

}  // namespace ferry::tools
