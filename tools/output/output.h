// Standard output, as every command prints to it. Results never depend on it: what cannot be
// written is lost alone, and the end of the program says so.
#pragma once

#include <spdlog/fmt/fmt.h>

#include <string>
#include <string_view>
#include <utility>

#include "ferry/error.h"

namespace ferry::tools {

// Text of whatever origin: what would steer a terminal is shown instead (printable()). Nothing is
// thrown. After the first part that could not be written nothing is printed.
void print_text(std::string_view text);
template <class... Arguments>
void print(fmt::format_string<Arguments...> format, Arguments&&... arguments) {
    print_text(fmt::format(format, std::forward<Arguments>(arguments)...));
}

// For commands that go on for long: a reader has it all by now, or a warning is given, once.
void flush_output();
// For a command that is done, or must not begin before it was read: throws io where a part was
// lost.
void check_output();

bool output_failed();  // as the C library knows
Error output_error(std::string reason);

}  // namespace ferry::tools
