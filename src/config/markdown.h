// The page of all keys.
#pragma once

#include <string>

namespace ferry {

// docs/configuration.md: every key with its type, range, default and meaning.
std::string describe_config_markdown();

}  // namespace ferry
