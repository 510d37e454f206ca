// What the planner knows of a machine.
#pragma once

#include <cstdint>

#include "ferry/device_kind.h"
#include "ferry/dtype.h"
#include "model/saved_activations.h"

namespace ferry::planner {

// Of memory, that the update of an element reads and writes.
int64_t update_bytes(const StateFormat& state, DType compute, DType wire);

// How fast a machine is: what speculative updates, chunks, buffers and recomputation are weighed
// with. It never changes a number of the run. The defaults are those of a small machine;
// docs/machine.md has both sets.
struct MachineFigures {
    // Of a step's kernels, everything recomputed; of what gives each result that may be kept for
    // backward, on one micro-batch and of the block where it takes longest. 0: as flops_per_s has
    // it.
    double forward_s = 0, backward_s = 0;
    model::OfSaved<double> saved_s{};
    double flops_per_s = 1.5e11;
    double copy_bytes_per_s = 8e9;     // host <-> device, one direction
    double nvme_bytes_per_s = 1.5e9;   // reads and writes mixed, all paths
    int64_t nvme_at_once = 1;          // chunks read, and as many written, that this rate takes
    double dram_bytes_per_s = 2e10;    // as the optimizer's update reaches
    double device_bytes_per_s = 2e10;  // the same in the device's memory
    double update_overhead_s = 2e-5;   // of an update, however small: its threads have to meet
    double out_of_place = 1.5;         // seconds of an update to a fresh slot, of one in place
    bool device_beside = false;        // kernels leave the host's cores and memory to the updates
};
MachineFigures default_figures(DeviceKind device);

}  // namespace ferry::planner
