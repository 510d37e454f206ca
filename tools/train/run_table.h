// The tables of `ferry plan`, and of `ferry train` before and after a run.
#pragma once

#include <nlohmann/json_fwd.hpp>

#include "ferry/config.h"
#include "ferry/train.h"
#include "planner/planner.h"

namespace ferry::tools {

// The share of the best product's rate that a model's operations a second are; 0: not known.
double mfu_of(double model_flops_per_s, double gemm_flops_per_s);

void print_plan(const planner::Plan& plan, const Config& config);
void print_run(const train::RunReport& report, const Config& config);
nlohmann::json tiers_json(const planner::Plan& plan);  // the plan's table

// What a rank sends in a step from within the kernels of blocks, all of which train.
struct KernelBytes {
    int64_t bytes = 0, calls = 0;
};
KernelBytes kernel_bytes(const planner::Plan& plan);
nlohmann::json summary_json(const train::RunReport& report, const planner::Plan& plan,
                            const Config& config);

}  // namespace ferry::tools
