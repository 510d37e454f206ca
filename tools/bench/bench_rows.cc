#include "bench_rows.h"

#include <spdlog/fmt/fmt.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "base/text.h"

namespace ferry::tools {
namespace {

// Four digits: more would be noise, and equal values would look different.
double rounded(double value) { return std::stod(fmt::format("{:.4g}", value)); }

std::vector<std::string> names_of_more(const std::vector<BenchRow>& rows) {
    std::vector<std::string> names;
    for (const BenchRow& row : rows) {
        for (const auto& [name, value] : row.more) {
            if (std::find(names.begin(), names.end(), name) == names.end()) names.push_back(name);
        }
    }
    return names;
}

std::string cell(double value) { return fmt::format(" {:>9.4g}", value); }

std::string line_of(const BenchRow& row, bool compared, const std::vector<std::string>& more) {
    std::string line = cell(row.value) + fmt::format(" {:<8}", row.unit);
    if (compared && row.reference == 0) {
        line += fmt::format(" {:>9} {:>6} {:>15}", "", "", "");
    } else if (compared) {
        const auto [least, most] = std::minmax_element(row.ratios.begin(), row.ratios.end());
        const std::string range =
            row.ratios.size() > 1 ? fmt::format("{:>7.3f}-{:<7.3f}", *least, *most) : "";
        line += cell(row.reference) + fmt::format(" {:>6.3f} {:>15}", row.ratio, range);
    }
    for (const std::string& name : more) {
        const auto found = std::find_if(row.more.begin(), row.more.end(),
                                        [&](const auto& one) { return one.first == name; });
        const std::string text = found == row.more.end() ? "" : cell(found->second);
        line += fmt::format(" {:>{}}", text, std::max<size_t>(10, name.size()));
    }
    return line;
}

}  // namespace

BenchRow compared(std::string name, std::string unit, const std::vector<double>& values,
                  const std::vector<double>& references, std::vector<double> ratios) {
    const double ratio = median(ratios);
    return {.name = std::move(name),
            .value = median(values),
            .unit = std::move(unit),
            .reference = median(references),
            .ratio = ratio,
            .ratios = std::move(ratios)};
}

nlohmann::json rows_json(const std::vector<BenchRow>& rows, const std::string& command,
                         const nlohmann::json& machine) {
    nlohmann::json all = nlohmann::json::array();
    for (const BenchRow& row : rows) {
        nlohmann::json one = {{"name", row.name},
                              {"value", rounded(row.value)},
                              {"unit", row.unit},
                              {"reference", nullptr},
                              {"ratio", nullptr}};
        if (row.reference != 0) {
            one["reference"] = rounded(row.reference);
            one["ratio"] = rounded(row.ratio);
        }
        for (const double ratio : row.ratios) one["ratios"].push_back(rounded(ratio));
        for (const auto& [name, value] : row.more) one[name] = rounded(value);
        all.push_back(std::move(one));
    }
    return {{"machine", machine}, {"command", command}, {"rows", std::move(all)}};
}

std::string rows_table(const std::vector<BenchRow>& rows, const std::string& reference) {
    size_t width = 0;
    std::vector<std::string> names;  // files' may hold anything
    names.reserve(rows.size());
    for (const BenchRow& row : rows) names.push_back(one_line(row.name));
    for (const std::string& name : names) width = std::max(width, name.size());
    const std::vector<std::string> more = names_of_more(rows);
    std::string out = fmt::format("{:<{}} {:>9} {:<8}", "", width, "ferry", "");
    if (!reference.empty())
        out += fmt::format(" {:>9} {:>6} {:>15}", reference, "ratio", "95 %     ");
    for (const std::string& name : more)
        out += fmt::format(" {:>{}}", name, std::max<size_t>(10, name.size()));
    out += '\n';
    for (size_t i = 0; i < rows.size(); ++i) {
        const BenchRow& row = rows[i];
        out += fmt::format("{:<{}}", names[i], width) + line_of(row, !reference.empty(), more);
        out += '\n';
    }
    return out;
}

}  // namespace ferry::tools
