// Numbers on the command line.
#pragma once

#include <CLI/CLI.hpp>
#include <cmath>
#include <string>

namespace ferry::tools {

// CLI::Range lets "nan" through, of which every comparison is false.
inline CLI::Validator number_within(double low, double high) {
    const auto is_a_number = [](const std::string& text) {
        double value = 0;
        const bool known = CLI::detail::lexical_cast(text, value) && std::isfinite(value);
        return known ? std::string() : "not a number: " + text;
    };
    return CLI::Range(low, high) & CLI::Validator(is_a_number, "");
}

}  // namespace ferry::tools
