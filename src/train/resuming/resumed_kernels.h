// A run goes on with the kernels that it was started with: others round differently, and its state
// would be refused.
#pragma once

#include <span>

#include "ferry/config.h"
#include "ferry/device.h"
#include "model/model.h"

namespace ferry::train {

// Before the operations are made: of OpenBLAS's kernels, takes those whose numerics record is that
// of the durable state at the first of this rank's paths. None are: does nothing. Throws usage,
// naming both, where they are known and cannot be had in this process or on this processor.
void take_recorded_kernels(const Config& config, std::span<const NvmePath> paths,
                           const model::Shape& shape, const Device& device, int ranks);
// The same for the numerics record of a checkpoint, which other kernels can go on with: where they
// cannot be had, it does nothing.
void take_kernels_of(uint64_t numerics, const Config& config, const model::Shape& shape,
                     const Device& device, int ranks);

}  // namespace ferry::train
