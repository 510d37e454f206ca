// Runs a step's kernels on the buffers of a plan that is not running yet. Each runs once, so that a
// GPU has loaded it, or one runs at a time to be measured.
#pragma once

#include <map>
#include <span>

#include "cost/kernel_times.h"
#include "ferry/device.h"
#include "ferry/executor.h"
#include "model/model.h"
#include "ops/ops.h"
#include "planner/planner.h"
#include "swap/store.h"

namespace ferry::train {

// The stack, plan and machine that are measured. Kernels run as those of StepStates::kMeasured.
struct Bench {
    const planner::Plan& plan;
    Device& device;
    Executor& executor;
    swap::Kernels& kernels;
    swap::Store& store;
    ops::Ops* ops = nullptr;  // this and decoder are null where there are updates and no model
    const model::Decoder* decoder = nullptr;
};

// A kernel of a schedule, ready to run.
struct KernelCall {
    swap::Kernels* kernels = nullptr;
    swap::Call call{};
    void start(Stream& stream) {
        stream.launch({[](void* context, uint64_t) {
                           const auto& one = *static_cast<const KernelCall*>(context);
                           one.kernels->run(one.call);
                       },
                       this});
    }
};

// The operands of a step's task in the buffers.
swap::Call call_of(const swap::Task& task, const Bench& on);
// One kernel of each kind among the step's, except those that would change the state.
std::map<cost::KernelTimes::Kind, KernelCall> distinct_kernels(const swap::Schedule& step,
                                                               const Bench& on);
// Repeats a pattern in page-locked memory over device memory.
void fill_device(const Bench& on, std::byte* to, int64_t bytes, std::span<const std::byte> pattern);
// Makes each sequence of the token buffers one document.
void fill_documents(const Bench& on);
// Runs each kind of kernel of a recorded step once. So the driver loads its code, and cuBLASLt
// chooses its algorithm. Updates of the device's state run too, so there must be none yet.
void warm_up(const swap::Schedule& step, const Bench& on);

}  // namespace ferry::train
