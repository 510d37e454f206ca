// Starting kernels.
#pragma once

#include <cuda_runtime.h>

#include "ferry/units.h"
#include "ops/ops.h"

namespace ferry::ops::cuda {

// Throws Trouble::internal when the kernel named did not start, does_not_fit where there was no
// memory for its code.
void check_launch(const char* kernel);
// The same of a call that tells how it went.
void check_launch(const char* kernel, cudaError_t error);

inline unsigned blocks_for(int64_t items, int64_t per_block) {
    return static_cast<unsigned>(ceil_div(items, per_block));
}

}  // namespace ferry::ops::cuda
