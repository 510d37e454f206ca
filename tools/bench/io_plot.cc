#include "io_plot.h"

#include <spdlog/fmt/fmt.h>

#include <algorithm>
#include <array>
#include <cmath>

#include "base/text.h"
#include "tools/output/svg.h"

namespace ferry::tools {
namespace {

constexpr double kPanelWidth = 300, kPanelHeight = 210, kLeft = 60, kTop = 70, kGapX = 50,
                 kGapY = 76, kBottom = 62, kLegend = 110;

constexpr size_t kTitle = 42;  // characters, which a panel is wide

// The last characters of a name in UTF-8, at most so many.
std::string end_of(const std::string& name, size_t characters) {
    const auto begins_one = [](char byte) { return (static_cast<uint8_t>(byte) & 0xc0) != 0x80; };
    auto left = std::count_if(name.begin(), name.end(), begins_one);
    const auto most = static_cast<std::ptrdiff_t>(characters);
    if (left <= most) return name;
    size_t at = 0;
    // One of the characters is the ellipsis.
    for (; left >= most || !begins_one(name[at]); ++at) left -= begins_one(name[at]);
    return "…" + name.substr(at);
}

std::string short_size(int64_t bytes) {
    if (bytes >= kMiB && bytes % kMiB == 0) return fmt::format("{}M", bytes / kMiB);
    return bytes % kKiB == 0 ? fmt::format("{}K", bytes / kKiB) : std::to_string(bytes);
}

// The panels and what they share.
struct Layout {
    explicit Layout(const IoResult& result) {
        for (const IoPoint& point : result.points) {
            add(accesses, name_of(point.access));
            add(blocks, point.block_bytes);
            add(depths, point.depth);
        }
        std::sort(blocks.begin(), blocks.end());
        std::sort(depths.begin(), depths.end());
    }
    template <class T>
    static void add(std::vector<T>& list, const T& one) {
        if (std::find(list.begin(), list.end(), one) == list.end()) list.push_back(one);
    }
    std::vector<std::string> accesses{};
    std::vector<int64_t> blocks{};
    std::vector<int> depths{};
};

double rate_of(const IoResult& result, size_t place, const std::string& access, int64_t block,
               int depth) {
    for (const IoPoint& point : result.points) {
        if (point.place == place && name_of(point.access) == access && point.block_bytes == block &&
            point.depth == depth)
            return point.sample.gb_per_s();
    }
    return 0;
}

double highest(const IoResult& result, size_t place, const std::string& access) {
    double most = 0;
    for (const IoPoint& point : result.points) {
        if (point.place == place && (access.empty() || name_of(point.access) == access))
            most = std::max(most, point.sample.gb_per_s());
    }
    return most;
}

class Panel {
public:
    Panel(const IoResult& result, const Layout& layout, size_t place, size_t column)
        : result_(result),
          layout_(layout),
          place_(place),
          access_(layout.accesses[column]),
          x_(kLeft + static_cast<double>(column) * (kPanelWidth + kGapX)),
          y_(kTop + static_cast<double>(place) * (kPanelHeight + kGapY)),
          tick_(tick_for(highest(result, place, ""))),
          top_(std::ceil(highest(result, place, "") / tick_ + 1e-9) * tick_) {}

    std::string draw() const { return axes() + lines(); }

private:
    double x_of(size_t block) const {
        const auto last = static_cast<double>(std::max<size_t>(2, layout_.blocks.size()) - 1);
        return x_ + 12 + (kPanelWidth - 24) * static_cast<double>(block) / last;
    }
    double y_of(double rate) const { return y_ + kPanelHeight * (1 - rate / top_); }

    std::string axes() const {
        const std::string &place = result_.places[place_], kind = ": " + access_;
        std::string out = fmt::format(
            "  <text x=\"{:.0f}\" y=\"{:.0f}\" text-anchor=\"middle\">{}<title>{}</title></text>\n",
            x_ + kPanelWidth / 2, y_ - 8, svg_escaped(end_of(place, kTitle - kind.size()) + kind),
            svg_escaped(place + kind));
        for (double rate = 0; rate <= top_ + tick_ / 2; rate += tick_) {
            out += fmt::format(
                "  <line class=\"grid\" x1=\"{0:.1f}\" y1=\"{1:.1f}\" x2=\"{2:.1f}\" "
                "y2=\"{1:.1f}\"/>\n  <text class=\"faint\" x=\"{3:.1f}\" y=\"{4:.1f}\" "
                "text-anchor=\"end\">{5:g}</text>\n",
                x_, y_of(rate), x_ + kPanelWidth, x_ - 6, y_of(rate) + 4, rate);
        }
        for (size_t b = 0; b < layout_.blocks.size(); ++b) {
            out += fmt::format(
                "  <text class=\"faint\" x=\"{:.1f}\" y=\"{:.1f}\" text-anchor=\"middle\">{}"
                "</text>\n",
                x_of(b), y_ + kPanelHeight + 17, short_size(layout_.blocks[b]));
        }
        out += fmt::format(
            "  <path class=\"axis\" d=\"M{0:.1f} {1:.1f}V{2:.1f}H{3:.1f}\"/>\n"
            "  <text x=\"{4:.1f}\" y=\"{5:.1f}\" text-anchor=\"middle\">block size (bytes)</text>\n"
            "  <text transform=\"translate({6:.1f} {7:.1f}) rotate(-90)\" "
            "text-anchor=\"middle\">GB/s</text>\n",
            x_, y_, y_ + kPanelHeight, x_ + kPanelWidth, x_ + kPanelWidth / 2,
            y_ + kPanelHeight + 35, x_ - 42, y_ + kPanelHeight / 2);
        return out;
    }

    std::string lines() const {
        std::string out;
        for (size_t d = 0; d < layout_.depths.size(); ++d) {
            const char* colour = kColours[d % kColours.size()];
            std::string path, dots;
            for (size_t b = 0; b < layout_.blocks.size(); ++b) {
                const double rate =
                    rate_of(result_, place_, access_, layout_.blocks[b], layout_.depths[d]);
                if (rate <= 0) continue;
                path +=
                    fmt::format("{}{:.1f} {:.1f}", path.empty() ? "M" : "L", x_of(b), y_of(rate));
                dots += fmt::format(
                    "  <circle cx=\"{:.1f}\" cy=\"{:.1f}\" r=\"3\" fill=\"{}\"><title>{}, depth "
                    "{}: {:.2f} GB/s</title></circle>\n",
                    x_of(b), y_of(rate), colour, format_bytes(layout_.blocks[b]), layout_.depths[d],
                    rate);
            }
            out +=
                fmt::format("  <path d=\"{}\" stroke=\"{}\" stroke-width=\"2\" fill=\"none\"/>\n",
                            path, colour) +
                dots;
        }
        return out;
    }

    const IoResult& result_;
    const Layout& layout_;
    size_t place_;
    std::string access_;
    double x_, y_, tick_, top_;
};

std::string legend(const Layout& layout, double x) {
    std::string out = fmt::format(
        "  <text x=\"{:.0f}\" y=\"{:.0f}\">transfers</text>\n"
        "  <text x=\"{:.0f}\" y=\"{:.0f}\">in flight</text>\n",
        x, kTop + 4, x, kTop + 19);
    for (size_t d = 0; d < layout.depths.size(); ++d) {
        const double y = kTop + 40 + 20 * static_cast<double>(d);
        out += fmt::format(
            "  <path d=\"M{0:.0f} {1:.0f}h24\" stroke=\"{2}\" stroke-width=\"3\"/>\n"
            "  <text x=\"{3:.0f}\" y=\"{4:.0f}\">{5}</text>\n",
            x, y, kColours[d % kColours.size()], x + 32, y + 4, layout.depths[d]);
    }
    return out;
}

const char* shade(double share) {
    constexpr std::array<const char*, 5> kShades{"  ", "░░", "▒▒", "▓▓", "██"};
    return kShades[static_cast<size_t>(std::lround(std::clamp(share, 0.0, 1.0) * 4))];
}

}  // namespace

std::string svg_of(const IoResult& result, const std::string& caption) {
    const Layout layout(result);
    const auto columns = static_cast<double>(layout.accesses.size());
    const auto rows = static_cast<double>(result.places.size());
    const double right = kLeft + columns * (kPanelWidth + kGapX) - kGapX / 2;
    const double width = right + kLegend;
    const double height = kTop + rows * (kPanelHeight + kGapY) - kGapY + kBottom + 24;
    std::string out =
        svg_beginning(width, height, kLeft, "Storage bandwidth over block size and depth", caption);
    for (size_t place = 0; place < result.places.size(); ++place) {
        for (size_t column = 0; column < layout.accesses.size(); ++column)
            out += Panel(result, layout, place, column).draw();
    }
    return out + legend(layout, right) + "</svg>\n";
}

std::string heat_maps_of(const IoResult& result) {
    const Layout layout(result);
    std::string out;
    for (size_t place = 0; place < result.places.size(); ++place) {
        for (const std::string& access : layout.accesses) {
            const double most = highest(result, place, access);
            if (most <= 0) continue;
            out += fmt::format("\n{}: {}, GB/s; depth down, block size across\n  {:>5}",
                               one_line(result.places[place]), access, "");
            for (const int64_t block : layout.blocks)
                out += fmt::format(" {:>10}", short_size(block));
            for (const int depth : layout.depths) {
                out += fmt::format("\n  {:>5}", depth);
                for (const int64_t block : layout.blocks) {
                    const double rate = rate_of(result, place, access, block, depth);
                    out += fmt::format("  {} {:>6.2f}", shade(rate / most), rate);
                }
            }
            out += '\n';
        }
    }
    return out;
}

}  // namespace ferry::tools
