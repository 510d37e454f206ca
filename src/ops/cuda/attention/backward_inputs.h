// The inputs of attention's backward passes, with tensor cores or without.
#pragma once

#include "ops/cuda/shared/element.h"

namespace ferry::ops::cuda {

struct BackwardInputs {
    Attention shape;
    ConstView q, k, v, dout;
    const float *lse, *delta;  // at lse_index
    __device__ int64_t kv_head(int64_t head) const { return head / (shape.heads / shape.kv_heads); }

    // Loads those of rows [first, first + kRows), by as many threads; zeros beyond the sequence.
    template <int kRows>
    __device__ void load_lse_and_delta(float* lse_tile, float* delta_tile, int64_t base,
                                       int64_t first, int64_t head) const {
        if (threadIdx.x >= kRows) return;
        const bool inside = first + threadIdx.x < shape.sequence;
        const int64_t at = shape.lse_index(base + first + threadIdx.x, head);
        lse_tile[threadIdx.x] = inside ? lse[at] : 0.0f;
        delta_tile[threadIdx.x] = inside ? delta[at] : 0.0f;
    }
};

}  // namespace ferry::ops::cuda
