// How many of a cluster's ranks should share tensors, layers and state.
#pragma once

#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "cost/layouts.h"
#include "ferry/config.h"
#include "network.h"

namespace ferry::tools {

struct LayoutsReport {
    cost::ModelSizes model{};
    cost::Cluster cluster{};
    std::string rates{};  // whose they are
    std::vector<cost::Layout> layouts{};
};

// The best layout and three more. `gpu`: "h100", "h200" or "a100"; "": what the configuration's
// device is by default. Throws usage for another one, and does_not_fit where nothing fits.
LayoutsReport layouts_report(const Config& config, const train::RankCount& count,
                             const std::string& gpu, const std::optional<Network>& network);
std::string text_of(const LayoutsReport& report);
nlohmann::json to_json(const LayoutsReport& report);

}  // namespace ferry::tools
