#include "timeline_picture.h"

#include <spdlog/fmt/fmt.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <map>

#include "tools/output/svg.h"

namespace ferry::tools {
namespace {

using swap::Lane;

constexpr size_t kColumns = 76;

// A kernel's character in a terminal, and its colour otherwise.
struct Look {
    char letter;
    size_t colour;
};
Look look_of(const std::string& name) {
    static const std::map<std::string, Look> kLooks{{"embed", {'e', 5}},
                                                    {"forward", {'f', 0}},
                                                    {"head and loss", {'h', 2}},
                                                    {"backward", {'b', 1}},
                                                    {"weight gradients", {'w', 3}},
                                                    {"embed backward", {'e', 5}},
                                                    {"round and norm", {'r', 4}},
                                                    {"update", {'u', 3}},
                                                    {"update (speculative)", {'U', 3}},
                                                    {"read", {'R', 0}},
                                                    {"write", {'W', 3}},
                                                    {"verify", {'v', 2}},
                                                    {"seal", {'s', 4}},
                                                    {"gather weights", {'g', 0}},
                                                    {"pass on", {'p', 0}},
                                                    {"take over", {'t', 1}},
                                                    {"exchange gradients", {'x', 1}},
                                                    {"gather gradients", {'g', 1}},
                                                    {"sum, round and norm", {'r', 4}},
                                                    {"cut for the ranks", {'r', 4}}};
    const auto known = kLooks.find(name);
    return known == kLooks.end() ? Look{'.', 5} : known->second;
}

size_t rows_of(const std::vector<Bar>& bars) {
    const bool ranks = std::ranges::any_of(bars, [](const Bar& b) { return b.lane == Lane::comm; });
    return swap::lanes_of(ranks ? 2 : 1);
}

// Calls part(begin, end) for what of the slice lies in the step, wrapped around its end.
template <class Part>
void wrapped(const swap::Timeline::Slice& slice, double step_s, const Part& part) {
    const double begin = std::fmod(slice.begin_s, step_s);
    const double length = std::min(slice.end_s - slice.begin_s, step_s);
    part(begin, std::min(begin + length, step_s));
    if (begin + length > step_s) part(0.0, begin + length - step_s);
}

const char* shade(double busy) {
    constexpr std::array<const char*, 5> kShades{" ", "░", "▒", "▓", "█"};
    return kShades[static_cast<size_t>(std::lround(std::clamp(busy, 0.0, 1.0) * 4))];
}

std::string row_of(const std::vector<Bar>& bars, Lane lane, double step_s) {
    const double cell_s = step_s / double{kColumns};
    std::array<std::map<std::string, double>, kColumns> cells;
    for (const Bar& bar : bars) {
        if (bar.lane != lane) continue;
        const auto first = static_cast<size_t>(bar.begin_s / cell_s);
        for (size_t c = first; c < kColumns && static_cast<double>(c) * cell_s < bar.end_s; ++c) {
            const double begin = std::max(bar.begin_s, static_cast<double>(c) * cell_s),
                         end = std::min(bar.end_s, static_cast<double>(c + 1) * cell_s);
            const double density = bar.busy_s / std::max(bar.end_s - bar.begin_s, 1e-12);
            cells[c][bar.name] += std::max(0.0, end - begin) * density;
        }
    }
    const bool letters = lane == Lane::compute || lane == Lane::team;
    std::string row;
    for (const auto& cell : cells) {
        double busy_s = 0;
        const std::pair<const std::string, double>* most = nullptr;
        for (const auto& one : cell) {
            busy_s += one.second;
            if (!most || one.second > most->second) most = &one;
        }
        const double busy = busy_s / cell_s;
        if (!letters)
            row += shade(busy);
        else
            row += most && busy >= 0.25 ? look_of(most->first).letter : ' ';
    }
    return row;
}

// Lane by lane, in order; `gap_s` between two of a kind does not separate them.
std::vector<Bar> merged(std::vector<Bar> bars, double gap_s) {
    std::stable_sort(bars.begin(), bars.end(), [](const Bar& a, const Bar& b) {
        return std::pair(a.lane, a.begin_s) < std::pair(b.lane, b.begin_s);
    });
    std::vector<Bar> few;
    for (Bar& bar : bars) {
        const bool follows = !few.empty() && few.back().lane == bar.lane &&
                             few.back().name == bar.name && bar.begin_s - few.back().end_s <= gap_s;
        if (!follows) {
            few.push_back(std::move(bar));
            continue;
        }
        few.back().end_s = std::max(few.back().end_s, bar.end_s);
        few.back().busy_s += bar.busy_s;
        few.back().tasks += bar.tasks;
        few.back().bytes += bar.bytes;
    }
    return few;
}

double busy_share(const train::Prediction& prediction, size_t lane) {
    return prediction.timeline.busy_seconds[lane] / prediction.timeline.step_seconds;
}

}  // namespace

std::vector<Bar> bars_of(const train::Prediction& prediction, double gap) {
    return bars_of(prediction.schedule, prediction.timeline, gap);
}

std::vector<Bar> bars_of(const swap::Schedule& step, const swap::Timeline& timeline, double gap) {
    const double step_s = timeline.step_seconds;
    std::vector<Bar> bars;
    for (size_t t = 0; t < step.tasks.size(); ++t) {
        const swap::Task& task = step.tasks[t];
        const swap::Timeline::Slice& slice = timeline.tasks[t];
        if (slice.end_s <= slice.begin_s) continue;
        wrapped(slice, step_s, [&](double begin, double end) {
            const double share = (end - begin) / (slice.end_s - slice.begin_s);
            const bool moves = task.lane != Lane::compute;
            bars.push_back(
                {.lane = task.lane,
                 .name = cost::name_of(task),
                 .begin_s = begin,
                 .end_s = end,
                 .busy_s = end - begin,
                 .tasks = 1,
                 .bytes = moves ? std::llround(share * static_cast<double>(task.bytes)) : 0});
        });
    }
    return merged(std::move(bars), gap * step_s);
}

std::string timeline_text(const train::Prediction& prediction) {
    const double step_s = prediction.timeline.step_seconds;
    const std::vector<Bar> bars = bars_of(prediction, 0);
    std::string out;
    for (size_t lane = 0; lane < rows_of(bars); ++lane) {
        const auto id = static_cast<Lane>(lane);
        out += fmt::format("  {:<10} {} {:>4.0f}%\n", swap::name_of(id), row_of(bars, id, step_s),
                           100 * busy_share(prediction, lane));
    }
    const std::string end = fmt::format("{:.4g} s", step_s);
    return out + fmt::format("  {:<10} 0{:>{}}\n", "", end, kColumns - 1) +
           "  compute: f forward, h head and loss, b backward, w weights' gradients, e "
           "embedding, r rounding;\n  team: u update, U speculative update; the other lanes are "
           "shaded by how busy they are\n";
}

namespace {

struct PictureRow {
    std::string name{};
    std::vector<Bar> bars{};
};

std::string bar_svg(const Bar& bar, double x, double y, double width, double height) {
    const std::string bytes = bar.bytes > 0 ? ", " + format_bytes(bar.bytes) : "";
    const std::string tasks = bar.tasks > 1 ? fmt::format(" ({} tasks)", bar.tasks) : "";
    return fmt::format(
        "  <rect x=\"{:.2f}\" y=\"{:.0f}\" width=\"{:.2f}\" height=\"{:.0f}\" fill=\"{}\">"
        "<title>{}{}: {:.3f} to {:.3f} ms{}</title></rect>\n",
        x, y, width, height, kColours[look_of(bar.name).colour], bar.name, tasks, bar.begin_s * 1e3,
        bar.end_s * 1e3, bytes);
}

std::string rows_svg(const std::vector<PictureRow>& rows, double seconds, const std::string& title,
                     const std::string& caption) {
    constexpr double kLeft = 90, kTop = 56, kRow = 34, kBar = 24, kWidth = 1000, kRight = 60;
    const double bottom = kTop + kRow * static_cast<double>(rows.size());
    std::string out = svg_beginning(kLeft + kWidth + kRight, bottom + 64, kLeft, title, caption);
    const auto x_of = [&](double at_s) { return kLeft + kWidth * at_s / seconds; };
    const double tick = tick_for(seconds * 1e3);
    for (double ms = 0; ms <= seconds * 1e3 * (1 + 1e-9); ms += tick) {
        out += fmt::format(
            "  <path class=\"grid\" d=\"M{0:.1f} {1:.0f}V{2:.0f}\"/>\n  <text class=\"faint\" "
            "x=\"{0:.1f}\" y=\"{3:.0f}\" text-anchor=\"middle\">{4:g} ms</text>\n",
            x_of(ms * 1e-3), kTop - 6, bottom, bottom + 16, ms);
    }
    std::vector<double> busy_s(rows.size());
    for (size_t row = 0; row < rows.size(); ++row) {
        for (const Bar& bar : merged(rows[row].bars, seconds / kWidth)) {
            busy_s[row] += bar.busy_s;
            out += bar_svg(bar, x_of(bar.begin_s), kTop + kRow * static_cast<double>(row),
                           std::max(0.3, x_of(bar.end_s) - x_of(bar.begin_s)), kBar);
        }
    }
    for (size_t row = 0; row < rows.size(); ++row) {
        const double y = kTop + kRow * static_cast<double>(row) + kBar - 7;
        out += fmt::format(
            "  <text x=\"{:.0f}\" y=\"{:.0f}\" text-anchor=\"end\">{}</text>\n"
            "  <text class=\"faint\" x=\"{:.0f}\" y=\"{:.0f}\">{:.0f} %</text>\n",
            kLeft - 8, y, rows[row].name, kLeft + kWidth + 8, y, 100 * busy_s[row] / seconds);
    }
    return out + "</svg>\n";
}

std::string stages_svg(const train::Prediction& prediction, const std::string& caption) {
    std::vector<PictureRow> rows;
    for (const train::StagePrediction& stage : prediction.stages) {
        const std::string name = fmt::format("{} ", stage.stage.index);
        PictureRow computes{.name = name + "compute"}, exchanges{.name = name + "comm"};
        for (Bar& bar : bars_of(stage.schedule, stage.timeline, 0)) {
            if (bar.lane == Lane::compute)
                computes.bars.push_back(std::move(bar));
            else if (bar.lane == Lane::comm)
                exchanges.bars.push_back(std::move(bar));
        }
        rows.push_back(std::move(computes));
        rows.push_back(std::move(exchanges));
    }
    const double step_s = prediction.timeline.step_seconds;
    const std::string of_groups =
        prediction.by ? fmt::format(" and {} of {} {}", prediction.by->to, prediction.by->all,
                                    prediction.by->in_turn ? "micro-batches" : "groups")
                      : "";
    return rows_svg(rows, step_s,
                    fmt::format("One step of {} stages{} as planned: {:.4g} s",
                                prediction.stages.size(), of_groups, step_s),
                    caption);
}

}  // namespace

std::string bars_svg(const std::vector<Bar>& bars, double seconds, const std::string& title,
                     const std::string& caption) {
    std::vector<PictureRow> rows(rows_of(bars));
    for (size_t lane = 0; lane < rows.size(); ++lane)
        rows[lane].name = swap::name_of(static_cast<Lane>(lane));
    for (const Bar& bar : bars) rows[static_cast<size_t>(bar.lane)].bars.push_back(bar);
    return rows_svg(rows, seconds, title, caption);
}

std::string timeline_svg(const train::Prediction& prediction, const std::string& caption) {
    if (!prediction.stages.empty()) return stages_svg(prediction, caption);
    const double step_s = prediction.timeline.step_seconds;
    return bars_svg(bars_of(prediction, 0), step_s,
                    fmt::format("One step as planned: {:.4g} s", step_s), caption);
}

}  // namespace ferry::tools
