// Measures ferry's optimizer beside a hand-written loop in the same process: `ferry bench adam`.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "ferry/optim.h"

namespace ferry::tools {

struct AdamBench {
    int64_t count = int64_t{32} << 20;  // elements; 28 to 44 bytes each
    std::vector<int> threads{1};
    std::vector<DType> gradient_types{DType::bf16, DType::f32};
    DType weight_type = DType::bf16;       // bf16 or f16
    std::vector<optim::Method> methods{};  // besides AdamW; no hand-written loop for them
    std::vector<std::string> targets{};    // SIMD targets besides the best
    bool out_of_place = true;
    int pairs = 15;
};

// One line of the table: `value` is ferry's, `reference` the hand-written loop's (0: none), and
// `ratio` the median over pairs of reference / value: larger is better, 1 is equal.
struct Row {
    std::string name;
    double value = 0;
    std::string unit;
    double reference = 0;
    double ratio = 0;
    double ratio_low = 0, ratio_high = 0;  // 95 % interval of the median
    double of_triad = 0;                   // bytes a second against the triad's; 0: not given
};

std::vector<Row> measure_adam(const AdamBench& what);

// {"machine": {...}, "command": ..., "rows": [...]}, and the same as a table.
std::string to_json(const std::vector<Row>& rows, const std::string& command);
std::string to_table(const std::vector<Row>& rows);

}  // namespace ferry::tools
