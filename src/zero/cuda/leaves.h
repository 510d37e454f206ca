// A norm leaf of what a rank keeps.
#pragma once

#include "quads.h"

namespace ferry::zero::cuda {

// The squares of a leaf are added as ops::Ops::round_gradient says: by lanes of sixteen, in order.
__device__ inline float leaf_of(const float* squares) {
    float sum = 0;
#pragma unroll 16
    for (int i = 0; i < kLeaf; i += kRow) sum = sum + squares[i + threadIdx.x];
    for (int half = kRow / 2; half >= 1; half /= 2)
        sum = sum + __shfl_down_sync(0xffffu, sum, static_cast<unsigned>(half), kRow);
    return sum;
}

}  // namespace ferry::zero::cuda
