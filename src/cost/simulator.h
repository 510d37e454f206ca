// Durations of a step's tasks on a machine. swap::predict() simulates the schedule with them.
#pragma once

#include "cost/measurements.h"
#include "ferry/units.h"

namespace ferry::cost {

// Checks go piece by piece; aio's, which this module does not see.
constexpr int64_t kPieceBytes = 256 * kKiB;

// Kernels and updates take all cores, copies and checks one each. Reads and writes share the disk.
// Updates take all of the memory's bandwidth, as they do alone. Whatever else goes through memory
// takes the share of its own rate. So updates and a GPU's copies slow each other down. `measured`
// is one rank's, and must outlive the model.
swap::CostModel cost_model(WorkOf work_of, const Measurements& measured);

}  // namespace ferry::cost
