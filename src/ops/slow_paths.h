// Operations of a model that a GPU's fast libraries do not take: which, why, and what that costs.
#pragma once

#include <string>
#include <vector>

#include "ops/ops.h"

namespace ferry::ops {

struct SlowPath {
    std::string operation{};  // "attention backward"
    std::string shape{};      // "1 x 32768, heads 32/8 x 128"
    std::string why{};
    int64_t times = 0;  // that its scratch was asked for: once a block and micro-batch
    // Estimates of one call, by rates of an H100: as it is done, and as the fast path would.
    double seconds = 0, fast_seconds = 0;
};

// The slow ones among the operations whose scratch was asked for so far; a Decoder's plan asks for
// that of all its own. Empty on the CPU.
std::vector<SlowPath> slow_paths(const Ops& ops);

}  // namespace ferry::ops
