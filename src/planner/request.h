// The request for a plan: the budgets, the keys that the user has fixed, and the run's needs.
#pragma once

#include <cstdint>

#include "ferry/config.h"
#include "ferry/dtype.h"

namespace ferry::planner {

struct PlanRequest {
    DeviceKind device = DeviceKind::cpu;
    int64_t micro_batches = 1;  // a rank's in a step
    bool clips = false;         // the gradient's norm has a limit
    bool trains = true;         // an evaluation has no state, and may have every tensor frozen
    bool durable = false;       // committed steps outlive the process
    StateFormat state{};
    int64_t ns_steps = 0;  // Muon's iterations of a matrix
    DType ns_products = DType::f32;
    BudgetConfig budgets{};  // this rank's share
    int sharers = 1;         // ranks that have as much each of the host's memory and paths
    SwapConfig swap{};       // what the user decides; the planner decides the rest
};

}  // namespace ferry::planner
