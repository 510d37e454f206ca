// Bytes: their units, in numbers and in text.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace ferry {

constexpr int64_t kKiB = 1024, kMiB = 1024 * kKiB, kGiB = 1024 * kMiB;

constexpr int64_t round_up(int64_t value, int64_t multiple) {
    return (value + multiple - 1) / multiple * multiple;
}
constexpr int64_t round_down(int64_t value, int64_t multiple) {
    return value / multiple * multiple;
}
constexpr int64_t ceil_div(int64_t value, int64_t divisor) {
    return (value + divisor - 1) / divisor;
}

// "64MiB", "1.5 GiB", "4096", "2GB" -> bytes. Throws Trouble::usage naming `where`.
int64_t parse_bytes(std::string_view text, std::string_view where);
// 1610612736 -> "1.50 GiB"; exact below 1 KiB.
std::string format_bytes(int64_t bytes);

}  // namespace ferry
