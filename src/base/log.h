// The log, on standard error.
#pragma once

#include <string_view>

namespace ferry {

// Log lines go to standard error through spdlog; the level comes from FERRY_LOG (debug, info, warn,
// error; default info).
void log_debug(std::string_view message);
void log_info(std::string_view message);
void log_warn(std::string_view message);

}  // namespace ferry
