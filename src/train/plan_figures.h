// What is known of a machine, as the planner weighs with it.
#pragma once

#include <optional>
#include <vector>

#include "ferry/config.h"
#include "ferry/forecast.h"
#include "ferry/planner.h"

namespace ferry::train {

// What is not known is the device kind's default.
planner::MachineFigures planning_figures(const Config& config,
                                         const std::vector<model::Layer>& layers,
                                         const std::optional<Machine>& machine,
                                         const std::optional<KernelTimes>& kernels);
// `figures` may be null: none are known.
planner::MachineFigures planning_figures(const Config& config,
                                         const std::vector<model::Layer>& layers,
                                         const Figures* figures);

}  // namespace ferry::train
