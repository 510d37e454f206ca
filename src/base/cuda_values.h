// A stored value as fp32, on the GPU, and back: rounded once, to nearest even.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

namespace ferry {

__device__ inline float widened(float value) { return value; }
__device__ inline float widened(__nv_bfloat16 value) { return __bfloat162float(value); }
__device__ inline float widened(__half value) { return __half2float(value); }
__device__ inline void narrow(float value, float& to) { to = value; }
__device__ inline void narrow(float value, __nv_bfloat16& to) { to = __float2bfloat16_rn(value); }
__device__ inline void narrow(float value, __half& to) { to = __float2half_rn(value); }

}  // namespace ferry
