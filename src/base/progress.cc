#include "base/progress.h"

#include <spdlog/fmt/fmt.h>

#include <cmath>

#include "ferry/units.h"

namespace ferry {
namespace {

std::string time_text(double seconds) {
    const auto whole = static_cast<int64_t>(std::ceil(seconds));
    if (whole < 60) return fmt::format("{} s", whole);
    if (whole < 3600) return fmt::format("{} min {:02} s", whole / 60, whole % 60);
    return fmt::format("{} h {:02} min", whole / 3600, whole % 3600 / 60);
}

}  // namespace

std::string progress_text(int64_t bytes, int64_t of, double seconds) {
    const double rate = seconds > 0 ? static_cast<double>(bytes) / seconds : 0;
    std::string text =
        fmt::format("{} of {} ({:.0f} %)", format_bytes(bytes), format_bytes(of),
                    of > 0 ? 100.0 * static_cast<double>(bytes) / static_cast<double>(of) : 100.0);
    if (rate <= 0) return text;
    text += fmt::format(", {:.2f} GB/s", rate * 1e-9);
    return bytes < of ? text + ", " + time_text(static_cast<double>(of - bytes) / rate) + " left"
                      : text;
}

}  // namespace ferry
