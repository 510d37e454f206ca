#include "svg.h"

#include <spdlog/fmt/fmt.h>

#include <algorithm>
#include <cmath>

#include "writable.h"

namespace ferry::tools {
namespace {

// Tells ferry's pictures from others', which nothing replaces.
constexpr const char* kBeginning = "<svg data-made-by=\"ferry\" ";
constexpr const char* kStyle =
    "  <style>\n"
    "    .ground { fill: #ffffff } text { fill: #24292f; font: 12px sans-serif }\n"
    "    .title { font-size: 16px; font-weight: bold } .faint { fill: #6a737d }\n"
    "    .axis { stroke: #6a737d; fill: none } .grid { stroke: #d8dee4 }\n"
    "    @media (prefers-color-scheme: dark) {\n"
    "      .ground { fill: #161b22 } text { fill: #e6edf3 } .faint { fill: #9aa4af }\n"
    "      .axis { stroke: #9aa4af } .grid { stroke: #30363d }\n"
    "    }\n"
    "  </style>\n";

}  // namespace

std::string svg_beginning(double width, double height, double left, const std::string& title,
                          const std::string& caption) {
    return fmt::format(
        "{7}xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {0:.0f} {1:.0f}\" "
        "width=\"{0:.0f}\" height=\"{1:.0f}\">\n{2}"
        "  <rect class=\"ground\" width=\"100%\" height=\"100%\"/>\n"
        "  <text class=\"title\" x=\"{3:.0f}\" y=\"30\">{4}</text>\n"
        "  <text class=\"faint\" x=\"{3:.0f}\" y=\"{5:.0f}\">{6}</text>\n",
        width, height, kStyle, left, svg_escaped(title), height - 12, svg_escaped(caption),
        kBeginning);
}

std::string svg_escaped(const std::string& text) {
    std::string out;
    for (const char c : text) {
        if (c == '<' || c == '>' || c == '&')
            out += fmt::format("&#{};", static_cast<int>(c));
        else
            out += c;
    }
    return out;
}

double tick_for(double most) {
    const double power = std::pow(10.0, std::floor(std::log10(std::max(most, 1e-6) / 5)));
    for (const double factor : {1.0, 2.0, 5.0}) {
        if (factor * power * 5 >= most) return factor * power;
    }
    return 10 * power;
}

void check_picture_file(const std::string& option, const std::string& file) {
    check_writable(option, file, {.beginning = kBeginning});
}

void write_picture(const std::string& option, const std::string& file, const std::string& svg) {
    write_whole(option, file, svg, {.beginning = kBeginning});
}

}  // namespace ferry::tools
