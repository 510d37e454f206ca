// What no single key can say: how the values fit each other.
#pragma once

#include <string>

#include "ferry/config.h"

namespace ferry::config {

// Fills in what "auto" means when it depends on other keys (kv_heads, head_dim, total_steps), then
// checks the values against each other. `where` is the file's name.
void settle(Config& config, const std::string& where);

}  // namespace ferry::config
