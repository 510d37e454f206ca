// The least time of a placement's step: the sums by which the planner compares placements. The
// planner counts what its placement moves.
#pragma once

#include <cstdint>
#include <vector>

#include "cost/measurements.h"
#include "cost/traffic.h"

namespace ferry::cost {

// Seconds of a step's kernels.
struct KernelSeconds {
    double forward = 0, backward = 0;
};
// The same with everything recomputed, and every block as long as the longest that was timed. 0:
// none was timed.
KernelSeconds timed_kernels(const KernelTimes& kernels, int64_t micro_batches, int64_t blocks);

// Seconds that the host's update of so many elements takes.
double update_seconds(int64_t elements, const ElementBytes& element, const Measurements& measured);

// Bytes that a step moves over each link, and the seconds of its updates.
struct PlacedTraffic {
    double up_bytes = 0, down_bytes = 0, stored_bytes = 0;
    double host_updates_s = 0, device_updates_s = 0;
};

// Seconds of a layer's updates by the host.
struct LayerUpdates {
    bool block = false;  // forward and backward of it take their part of the kernels
    double speculative_s = 0, after_outcome_s = 0;
    double in_order_s = 0;  // all of them, where none is speculative
};

// Seconds of a step after one whose speculative updates were committed, and after one that made
// none.
struct OfPrevious {
    double committed = 0, not_speculative = 0;
};
// Seconds that the next step's first forward pass waits for the host's updates, layer by layer.
// Speculative updates begin as backward gives their gradients, the first layers' last. The others
// begin when the step has ended, in forward's order.
OfPrevious waits_for_updates(const std::vector<LayerUpdates>& layers, int64_t groups,
                             const KernelSeconds& kernels);

// Seconds of a step by its slowest link, where each is busy without a pause. The links are compute,
// with the time that forward waits for updates, copies, storage and host memory. Where the
// processors compute, updates and copies take their cores and their memory.
OfPrevious step_seconds(const PlacedTraffic& traffic, const KernelSeconds& kernels,
                        const OfPrevious& waits, const Measurements& measured);

}  // namespace ferry::cost
