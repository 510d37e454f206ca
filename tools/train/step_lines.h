// What `ferry train` says of its steps, as lines of text or of JSON.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>

#include "ferry/config.h"
#include "ferry/train.h"

namespace ferry::tools {

// The bounds that a step is compared with, as known before the first: zeros where nothing was
// measured.
struct Yardsticks {
    double bound_seconds = 0;
    double model_flops = 0, gemm_flops_per_s = 0;
};

// Null: there is no such number, which is not a 0. Of a step without targets nothing is computed;
// only a step that updates is clipped.
nlohmann::json to_json(const train::StepReport& report, const Config& config, const Yardsticks& by);
void print_step(const train::StepReport& report, const Config& config);

// Of the loss on the tokens that are held back, behind a step.
void print_evaluation(int64_t step, const train::Evaluation& found, const Config& config,
                      bool json);
// Of the whole state. Whoever compares those of two machines must know whose kernels they are with.
void print_hash(int64_t step, const std::string& hash, const Config& config, bool json);

}  // namespace ferry::tools
