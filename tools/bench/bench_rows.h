// Helpers of every benchmark: rows of a table, medians over pairs, the JSON.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>
#include <utility>
#include <vector>

#include "base/median.h"
#include "tools/machine/machine_text.h"

namespace ferry::tools {

// One line of the table. `value` is ferry's, `reference` the other side's (0: there is none), and
// `ratio` the median over pairs, turned so that larger is better and 1 is equal.
struct BenchRow {
    std::string name{};
    double value = 0;
    std::string unit{};
    double reference = 0;
    double ratio = 0;
    std::vector<double> ratios{};                        // one for each pair
    std::vector<std::pair<std::string, double>> more{};  // further values, by name
};

// Measurements in turns: `ratios` pair by pair, larger is better.
BenchRow compared(std::string name, std::string unit, const std::vector<double>& values,
                  const std::vector<double>& references, std::vector<double> ratios);

// {"machine": {...}, "command": ..., "rows": [...]}; what is in `more` stands beside the ratio.
// Without another side "reference" and "ratio" are null. "ratios" has those of the pairs, of which
// bench/common.py takes the interval.
nlohmann::json rows_json(const std::vector<BenchRow>& rows, const std::string& command,
                         const nlohmann::json& machine);
// A line for each row, with its ratio's least and most; a column for each name that occurs in
// `more`. `reference` heads the column of the other side; empty: nothing was compared.
std::string rows_table(const std::vector<BenchRow>& rows, const std::string& reference);

}  // namespace ferry::tools
