// DeepSpeed's CPU-Adam beside ferry's rows of the same run, where DeepSpeed is installed.
#pragma once

#include <string>
#include <vector>

#include "bench_adam.h"

namespace ferry::tools {

// A row for each thread count whose in-place fp32 row is among `ours`: ferry's value against
// DeepSpeed's update, unscale and cast together, which `script` (bench/adam_deepspeed.py) measures
// in a Python process. Says on standard error why there is none.
std::vector<Row> compare_deepspeed(const AdamBench& what, const AdamRows& ours,
                                   const std::string& script);

}  // namespace ferry::tools
