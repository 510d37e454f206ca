// Newton-Schulz's kernels beside its products. Sums and products are written as intrinsics: none is
// contracted, however the file is compiled.
#include "newton_schulz.h"

#include "ops/cuda/shared/launch.h"

namespace ferry::ops::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kTogether = 4;

// One block: all threads fetch, one adds, for the order is part of the result.
__global__ void __launch_bounds__(kThreads)
    norm_kernel(float* leaves, int64_t leaf_count, float least) {
    __shared__ float tile[kThreads];
    const int thread = static_cast<int>(threadIdx.x);
    double sum = 0;
    for (int64_t first = 0; first < leaf_count; first += kThreads) {
        const auto here = static_cast<int>(min(int64_t{kThreads}, leaf_count - first));
        if (thread < here) tile[thread] = leaves[first + thread];
        __syncthreads();
        if (thread == 0) {
            for (int i = 0; i < here; ++i) sum = __dadd_rn(sum, tile[i]);
        }
        __syncthreads();
    }
    if (thread != 0) return;
    const double norm = __dsqrt_rn(sum);
    leaves[0] = static_cast<float>(norm < least ? double{least} : norm);  // a NaN stays one
}

__global__ void divide_kernel(float* x, int64_t count, const float* divisor) {
    const int64_t i = (int64_t{blockIdx.x} * kThreads + threadIdx.x) * kTogether;
    if (i >= count) return;
    const float by = *divisor;
    auto* at = reinterpret_cast<float4*>(x + i);
    float4 values = *at;
    values.x = __fdiv_rn(values.x, by);
    values.y = __fdiv_rn(values.y, by);
    values.z = __fdiv_rn(values.z, by);
    values.w = __fdiv_rn(values.w, by);
    *at = values;
}

__global__ void polynomial_kernel(float a, float b, float c, const float* gram, float* square,
                                  int64_t side) {
    const int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
    if (i >= side * side) return;
    const float sum = __fadd_rn(__fmul_rn(b, gram[i]), __fmul_rn(c, square[i]));
    square[i] = i % side == i / side ? __fadd_rn(sum, a) : sum;
}

}  // namespace

void divide_by_norm(float* x, int64_t count, float* leaves, int64_t leaf_count, float least,
                    cudaStream_t stream) {
    FERRY_CHECK(count % kTogether == 0 && reinterpret_cast<uintptr_t>(x) % 16 == 0);
    norm_kernel<<<1, kThreads, 0, stream>>>(leaves, leaf_count, least);
    check_launch("norm of a matrix");
    divide_kernel<<<blocks_for(count, int64_t{kThreads} * kTogether), kThreads, 0, stream>>>(
        x, count, leaves);
    check_launch("matrix over its norm");
}

void polynomial(float a, float b, float c, const float* gram, float* square, int64_t side,
                cudaStream_t stream) {
    polynomial_kernel<<<blocks_for(side * side, kThreads), kThreads, 0, stream>>>(a, b, c, gram,
                                                                                  square, side);
    check_launch("polynomial of Newton-Schulz");
}

}  // namespace ferry::ops::cuda
