// The lower bound of a step (design.md section 4) for the plan's own placement: every link busy
// without a pause, everything overlapped; the slowest link sets it.
#pragma once

#include <string>
#include <vector>

#include "ferry/planner.h"
#include "ferry/swap.h"

namespace ferry::train {

// Useful bytes of one step over each lane.
std::array<int64_t, swap::kLanes> bytes_of(const swap::Schedule& step);

// What each link takes for one step when nothing else runs.
struct LinkSeconds {
    double compute = 0, h2d = 0, d2h = 0, nvme = 0, dram = 0;
    double bound() const;
    std::string binding() const;
};

// Times the compute kernels of a recorded step one by one, each kind once warm, on memory that is
// not in use yet; returns their sum over the step.
double time_kernels(const swap::Schedule& step, swap::Kernels& kernels, std::span<std::byte> device,
                    swap::Store& store, const planner::Plan& plan, int64_t sequence);
// Bytes a second of a copy between host and device memory.
double time_copy(Stream& stream, std::span<std::byte> device, std::span<std::byte> host, Executor& executor);
// Rewrites stored chunks through the staging buffers, as the optimizer pass does but without the
// update: at most `bytes_max` of them. For the disk's speed with reads and writes mixed.
swap::Schedule record_rewrite(const planner::Plan& plan, int64_t bytes_max);

}  // namespace ferry::train
