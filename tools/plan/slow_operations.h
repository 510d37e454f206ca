// Operations that do not go the fast way on this GPU, as `ferry plan` says so.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "ops/slow_paths.h"

namespace ferry::tools {

std::string text_of(const std::vector<ops::SlowPath>& paths);  // a line each
nlohmann::json to_json(const std::vector<ops::SlowPath>& paths);

}  // namespace ferry::tools
