// Outputs of attention over two sets of keys become the one over both.
#include "ops/cuda/shared/kernels.h"
#include "ops/cuda/shared/launch.h"

namespace ferry::ops::cuda {
namespace {

constexpr int kThreads = 256, kWarp = 32;

// A warp a row of a head.
__global__ void merge_kernel(int64_t heads, ConstView part, const float* part_lse, View sum,
                             float* sum_lse) {
    const int64_t i = (int64_t{blockIdx.x} * kThreads + threadIdx.x) / kWarp;
    if (i >= heads * sum.rows) return;
    const int64_t head = i / sum.rows, row = i % sum.rows, d = sum.cols / heads;
    const float a = sum_lse[i], b = part_lse[i], top = fmaxf(a, b);
    if (top == -INFINITY) return;  // the row has seen nothing yet
    const float of_sum = expf(a - top), of_part = expf(b - top), both = of_sum + of_part;
    float* to = static_cast<float*>(sum.data) + row * sum.ld + head * d;
    const float* from = static_cast<const float*>(part.data) + row * part.ld + head * d;
    for (int64_t c = threadIdx.x % kWarp; c < d; c += kWarp)
        to[c] = (of_sum * to[c] + of_part * from[c]) / both;
    __syncwarp();  // all lanes have read the log-sum-exp
    if (threadIdx.x % kWarp == 0) sum_lse[i] = top + logf(both);
}

}  // namespace

void merge_parts(int64_t heads, ConstView part, const float* part_lse, View sum, float* sum_lse,
                 cudaStream_t stream) {
    FERRY_CHECK(part.type == DType::f32 && sum.type == DType::f32 && part.rows == sum.rows);
    const int64_t rows = heads * sum.rows;
    if (rows == 0) return;
    merge_kernel<<<blocks_for(rows * kWarp, kThreads), kThreads, 0, stream>>>(heads, part, part_lse,
                                                                              sum, sum_lse);
    check_launch("attention's parts merged");
}

}  // namespace ferry::ops::cuda
