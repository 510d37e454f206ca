// Elements of any type as fp32, on the GPU. An output is rounded once, to nearest even.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "ops/ops.h"

namespace ferry::ops::cuda {

__device__ inline float load(const void* data, DType type, int64_t i) {
    switch (type) {
        case DType::bf16:
            return __bfloat162float(static_cast<const __nv_bfloat16*>(data)[i]);
        case DType::f16:
            return __half2float(static_cast<const __half*>(data)[i]);
        default:
            return static_cast<const float*>(data)[i];
    }
}

__device__ inline void store(float value, void* data, DType type, int64_t i) {
    switch (type) {
        case DType::bf16:
            static_cast<__nv_bfloat16*>(data)[i] = __float2bfloat16_rn(value);
            break;
        case DType::f16:
            static_cast<__half*>(data)[i] = __float2half_rn(value);
            break;
        default:
            static_cast<float*>(data)[i] = value;
    }
}

__device__ inline float rounded(float value, DType type) {
    switch (type) {
        case DType::bf16:
            return __bfloat162float(__float2bfloat16_rn(value));
        case DType::f16:
            return __half2float(__float2half_rn(value));
        default:
            return value;
    }
}

__device__ inline float load(const ConstView& v, int64_t row, int64_t col) {
    return load(v.data, v.type, row * v.ld + col);
}
__device__ inline float load(const View& v, int64_t row, int64_t col) {
    return load(v.data, v.type, row * v.ld + col);
}
__device__ inline void store(float value, const View& v, int64_t row, int64_t col) {
    store(value, v.data, v.type, row * v.ld + col);
}

// The sum over a block of kThreads, in every thread: a fixed tree.
template <int kThreads>
__device__ double block_sum(double value) {
    __shared__ double sums[kThreads / 32];
    for (int half = 16; half > 0; half /= 2) value += __shfl_xor_sync(0xffffffffu, value, half);
    __syncthreads();  // the room may still be read by the sum before
    if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = value;
    __syncthreads();
    double total = 0;
    for (int warp = 0; warp < kThreads / 32; ++warp) total += sums[warp];
    return total;
}

template <int kThreads>
__device__ float block_max(float value) {
    __shared__ float tops[kThreads / 32];
    for (int half = 16; half > 0; half /= 2)
        value = fmaxf(value, __shfl_xor_sync(0xffffffffu, value, half));
    __syncthreads();
    if (threadIdx.x % 32 == 0) tops[threadIdx.x / 32] = value;
    __syncthreads();
    float top = tops[0];
    for (int warp = 1; warp < kThreads / 32; ++warp) top = fmaxf(top, tops[warp]);
    return top;
}

}  // namespace ferry::ops::cuda
