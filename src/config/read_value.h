// One JSON value into the field of one key.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>

#include "schema.h"

namespace ferry::config {

// `where` names the file or option and the key. Throws Trouble::usage for a wrong type or a value
// outside the key's range or choices.
void read_value(const Key& key, const nlohmann::json& value, const std::string& where,
                Config& config);

// "text \"abc\"", "number 1.5", "null": a JSON value in an error.
std::string describe(const nlohmann::json& value);

}  // namespace ferry::config
