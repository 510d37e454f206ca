#include "pattern_picture.h"

#include <spdlog/fmt/fmt.h>

#include <algorithm>
#include <span>

#include "tools/output/svg.h"

namespace ferry::tools {
namespace {

constexpr double kSide = 220, kGap = 24, kLeft = 24, kTop = 64, kBottom = 36;

// Columns that follow each other are one rectangle.
std::string runs_of(std::span<const int32_t> columns, int64_t row, double x, double y,
                    double cell) {
    std::string out;
    for (size_t i = 0; i < columns.size();) {
        size_t end = i + 1;
        while (end < columns.size() && columns[end] == columns[end - 1] + 1) ++end;
        out += fmt::format(
            "  <rect x=\"{:.2f}\" y=\"{:.2f}\" width=\"{:.2f}\" height=\"{:.2f}\" fill=\"{}\"/>\n",
            x + cell * columns[i], y + cell * static_cast<double>(row),
            cell * static_cast<double>(end - i), cell, kColours[0]);
        i = end;
    }
    return out;
}

}  // namespace

std::string pattern_svg(const ops::BlockLists& lists, const std::string& title,
                        const std::string& caption) {
    const int shown = std::min(lists.layouts, 4);
    const double width = 2 * kLeft + shown * kSide + (shown - 1) * kGap;
    const double cell = kSide / lists.blocks;
    std::string out =
        svg_beginning(std::max(width, 420.0), kTop + kSide + kBottom, kLeft, title, caption);
    for (int layout = 0; layout < shown; ++layout) {
        const double x = kLeft + layout * (kSide + kGap);
        if (lists.layouts > 1)
            out += fmt::format("  <text class=\"faint\" x=\"{:.0f}\" y=\"{:.0f}\">head {}</text>\n",
                               x, kTop - 8, layout);
        for (int64_t row = 0; row < lists.blocks; ++row)
            out += runs_of(lists.keys_of(layout, row), row, x, kTop, cell);
        // What no token sees lies above the diagonal.
        out += fmt::format("  <path class=\"axis\" d=\"M{0:.0f} {1:.0f}V{2:.0f}H{3:.0f}Z\"/>\n", x,
                           kTop, kTop + kSide, x + kSide);
    }
    return out + "</svg>\n";
}

}  // namespace ferry::tools
