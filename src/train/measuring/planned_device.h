// The ranks and the device that a plan is made for.
#pragma once

#include <cstdint>
#include <string>

#include "cost/measurements.h"
#include "planner/planner.h"

namespace ferry::train {

// The ranks of a run: how many there are, and how many of them share a host.
struct RankCount {
    int ranks = 1, on_a_host = 1;
    int gpu = 0;  // the GPU of its host that this rank opens
    // Ranks that run on this machine at the same time; 0: those of a host. More where several
    // hosts are emulated here.
    int here = 0;
};

// A device of another machine, as that one's measurements describe it. 0: not known.
struct AbsentDevice {
    std::string architecture{};  // "cuda sm_90"
    int64_t memory_bytes = 0;    // that a process can have of it, all told
    planner::DeviceNeeds needs{};
    int threads = 1;            // threads of the team beside it
    cost::KernelsOf kernels{};  // times of the model there; none: not known
};

}  // namespace ferry::train
