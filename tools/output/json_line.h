// A line of JSON on standard output.
#pragma once

#include <nlohmann/json.hpp>
#include <string>

#include "base/text.h"

namespace ferry::tools {

// A path's name may hold bytes that are no UTF-8: they are replaced, as JSON has no room for them.
// Characters that would steer a terminal are escaped.
template <class Json>
std::string json_line(const Json& value) {
    return json_escaped(value.dump(-1, ' ', false, Json::error_handler_t::replace)) + "\n";
}

}  // namespace ferry::tools
