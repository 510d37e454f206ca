// A norm leaf of what a rank keeps: the squares of its elements, and their sum.
#pragma once

#include "quads.h"

namespace ferry::zero::cuda {

// Of four values as they are in a type. Those of tiny ones count as zero.
template <class T>
__device__ float4 squares_of(const Quad& values) {
    float squares[kQuad];
    for (int k = 0; k < kQuad; ++k) {
        T once;
        narrow(values.at[k], once);
        const float rounded = widened(once);
        const float value = fabsf(rounded) < 0x1p-60F ? 0.0f : rounded;
        squares[k] = value * value;
    }
    return make_float4(squares[0], squares[1], squares[2], squares[3]);
}

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
