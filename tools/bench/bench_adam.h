// Measures ferry's optimizer beside a hand-written loop in the same process: `ferry bench adam`.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "bench_rows.h"
#include "ferry/optim.h"

namespace ferry::tools {

struct AdamBench {
    int64_t count = int64_t{32} << 20;  // elements
    std::vector<int> threads{1};
    std::vector<DType> gradient_types{DType::bf16, DType::f32};
    DType weight_type = DType::bf16;       // bf16 or f16
    std::vector<optim::Method> methods{};  // besides AdamW; no hand-written loop for them
    std::vector<std::string> targets{};    // SIMD targets besides the best
    std::vector<StateFormat> formats{};    // besides fp32 throughout; no hand-written loop either
    bool out_of_place = true;
    int pairs = 15;
};

// Bytes of all arrays together.
int64_t bytes_of(const AdamBench& what);

struct AdamRows {
    std::vector<Row> rows{};
    // By the number of threads, AdamW's in place from fp32 gradients: what DeepSpeed's does.
    std::map<int, size_t> in_place_fp32{};
};
// A row for each loop, in ns/param; `reference` is the hand-written loop, and "triad" the bytes
// that the pass must move a second against a streaming triad's. Throws Trouble::does_not_fit where
// the system gives no memory.
AdamRows measure_adam(const AdamBench& what);

}  // namespace ferry::tools
