// Profiles a step's compute: every operation of its kernels, as the engine calls it, timed.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "ferry/config.h"
#include "ops/product_table.h"
#include "ops/slow_paths.h"
#include "ops/timed_ops.h"

namespace ferry::train {

struct ProfiledOp {
    std::string kernel{};  // the step's kernel, as KernelTimes names it
    ops::OpCall call{};    // its seconds: the median over rounds, of one call
    int64_t calls = 0;     // in a step
};

struct KernelProfile {
    std::vector<ProfiledOp> ops{};   // in the order in which a step first calls them
    double product_flops_per_s = 0;  // one large product's in the compute type; 0: not known
    double copy_bytes_per_s = 0;  // one large copy's within the device's memory, reads and writes
    std::string device{};         // "cuda sm_90"
    int64_t tokens = 0;           // in a step
    // Blocks that do not compute it again.
    int64_t attention_saved = 0, mlp_saved = 0, projections_saved = 0;
};

// Plans the configuration, and runs each kind of kernel that a step of the plan has, on buffers of
// the plan's sizes: `rounds` times, after a GPU's clock is steady under their load. Kernels go in
// a step's order, so that a call finds the caches as a step leaves them. Updates of the state are
// those that the device makes. Blocks for seconds. Throws Error. tuned (optional): receives the
// fastest algorithms of the step's products, which are then the ones that are timed; throws usage
// where the device's have no choice.
KernelProfile profile_kernels(const Config& config, int rounds, ops::ProductTable* tuned = nullptr);

// The operations of a step that do not go the fast way on the configuration's GPU, `times` a step.
// Opens the device and reserves nothing; cuDNN builds its kernels. Empty on the CPU. Where the GPU
// is not `here`, those that the model's shape alone names; nullopt if it names none.
std::optional<std::vector<ops::SlowPath>> slow_operations(const Config& config, bool here);

}  // namespace ferry::train
