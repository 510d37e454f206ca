// The kernels behind ops/matrix_kernels.h. Each enqueues on `stream`.
#pragma once

#include <cuda_runtime.h>

#include <memory>

#include "ops/ops.h"

namespace ferry::ops::cuda {

// leaves[0] becomes the divisor.
void divide_by_norm(float* x, int64_t count, float* leaves, int64_t leaf_count, float least,
                    cudaStream_t stream);
void polynomial(float a, float b, float c, const float* gram, float* square, int64_t side,
                cudaStream_t stream);

// The GPU's operations on another stream than its compute stream, without cuDNN.
std::unique_ptr<Ops> ops_on_stream(Device& device, cudaStream_t stream);

}  // namespace ferry::ops::cuda
