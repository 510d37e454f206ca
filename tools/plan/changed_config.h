// The configuration of `ferry plan` with other keys: optimizers that it compares with, layouts that
// it weighs.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "network.h"
#include "plan_options.h"

namespace ferry::tools {

// The configuration with these keys more, or what refuses it. It has been warned of already.
struct Changed {
    std::optional<Config> config{};
    std::string why{};
};
Changed with_keys(const PlanOptions& options, const std::vector<std::string>& more);

// The optimizers that send momentum, for a run of AdamW or Adam. As the papers have it, the second
// moment stays from a fifth of the steps on, or from the end of the warm-up. Coded gradients are
// not theirs.
std::vector<OtherOptimizer> others_of(const PlanOptions& options, const Config& config);

// With --layouts the number of stages is chosen, unless it is given: what the configuration's
// checks then say of one stage is of none.
Config config_to_divide(const PlanOptions& options);

}  // namespace ferry::tools
