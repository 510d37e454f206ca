// What `ferry plan` was asked: its options, and the ranks and hosts that they mean.
#pragma once

#include <CLI/CLI.hpp>
#include <optional>
#include <string>

#include "ferry/config.h"
#include "network.h"
#include "tools/options/override_options.h"
#include "train/prediction/predictor.h"

namespace ferry::tools {

struct PlanOptions {
    std::string config{};
    Overrides overrides{};
    std::string machine{}, svg{}, pattern_svg{}, network{}, network_latency = "0us", gpu{};
    train::RankCount count{.ranks = 1, .on_a_host = 0};  // on_a_host 0: all of them
    int hosts = 0;                                       // 0: by on_a_host
    bool schedule = false, json = false, prediction = true, longest = false, layouts = false;
};
void add_plan_options(CLI::App& command, PlanOptions& options);

// With --network, one rank a host unless something says more. Throws usage where the options
// disagree, or the network joins nothing.
train::RankCount count_of(const PlanOptions& options, const Config& config);
std::optional<Network> network_of(const PlanOptions& options);

}  // namespace ferry::tools
