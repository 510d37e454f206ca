// The learning rate over the steps of a run, as `ferry plan --schedule` shows it.
#pragma once

#include <nlohmann/json_fwd.hpp>

#include "ferry/config.h"

namespace ferry::tools {

void print_learning_rates(const Config& config);
// Of at most 10,000 steps.
nlohmann::json learning_rates_json(const Config& config);

}  // namespace ferry::tools
