// Durations of a step's tasks on a machine. swap::predict() simulates the schedule with them.
#pragma once

#include "cost/measurements.h"
#include "ferry/units.h"

namespace ferry::cost {

// Checks go piece by piece; aio's, which this module does not see.
constexpr int64_t kPieceBytes = 256 * kKiB;

// Kernels and updates take all cores, copies and checks one each; reads and writes share the disk.
// Updates take all of the memory's bandwidth, as they do alone, and whatever else goes through it
// its own rate's part: beside a GPU's copies both get slower. `measured` is of one rank, and must
// outlive the model.
swap::CostModel cost_model(WorkOf work_of, const Measurements& measured);

}  // namespace ferry::cost
