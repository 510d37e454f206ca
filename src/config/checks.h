// What no single key can say: how the values fit each other.
#pragma once

#include <set>
#include <string>
#include <string_view>

#include "ferry/config.h"

namespace ferry::config {

// Paths of the keys that the user gave.
using Given = std::set<std::string_view>;

// Fills in what depends on other keys (kv_heads, head_dim, total_steps, the method's own defaults),
// then checks the values against each other. `where` is the file's name.
void settle(Config& config, const Given& given, const std::string& where);

}  // namespace ferry::config
