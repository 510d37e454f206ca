// What one rank of this machine has while kernels are measured: of the same plan, on its part of
// the cores.
#pragma once

#include <cstdint>
#include <memory>

#include "cost/kernel_times.h"
#include "cost/measurements.h"
#include "ferry/device.h"
#include "ferry/executor.h"
#include "model_on_device.h"
#include "planner/planner.h"
#include "together.h"
#include "topology/topology.h"
#include "train/setup/rank_share.h"
#include "train/stack/tier_stack.h"

namespace ferry::train {

class MeasuredRank {
public:
    // The first rank's executor and device are the model's own, which outlives it. `buffers`: a
    // plan of nothing else.
    MeasuredRank(ModelOnDevice& model, int rank, planner::Plan buffers);

    // The slowest rank's. `working_bytes`: updates are timed over as much, or what there is.
    cost::Measurements measure(int64_t working_bytes, Together& together);
    // Of the plan's kernels those that `known` has not.
    cost::KernelTimes measure_missing(const cost::KernelTimes& known, Together& together);

private:
    Topology left_now();

    ModelOnDevice& model_;
    const RankShare share_;
    const std::unique_ptr<Executor> own_executor_;
    Executor& executor_;
    const std::unique_ptr<Device> own_device_;
    TierStack stack_;
};

}  // namespace ferry::train
