// Softmax cross-entropy, a block of threads a row.
#include "element.h"
#include "kernels.h"
#include "launch.h"

namespace ferry::ops::cuda {
namespace {

constexpr int kThreads = 256;

__global__ void row_kernel(ConstView logits, const int32_t* targets, float scale, View dlogits,
                           double* losses) {
    const int64_t row = blockIdx.x;
    const int32_t target = targets[row];
    if (target < 0) {
        if (threadIdx.x == 0) losses[row] = 0;
        if (dlogits.data == nullptr) return;
        for (int64_t c = threadIdx.x; c < dlogits.cols; c += kThreads) store(0, dlogits, row, c);
        return;
    }
    const float* in = static_cast<const float*>(logits.data) + row * logits.ld;
    float top = -INFINITY;
    for (int64_t c = threadIdx.x; c < logits.cols; c += kThreads) top = fmaxf(top, in[c]);
    top = block_max<kThreads>(top);
    float part = 0;
    for (int64_t c = threadIdx.x; c < logits.cols; c += kThreads) part += expf(in[c] - top);
    const double sum = block_sum<kThreads>(static_cast<double>(part));
    const double of_target = static_cast<double>(in[target]) - static_cast<double>(top);
    if (threadIdx.x == 0) losses[row] = log(sum) - of_target;
    if (dlogits.data == nullptr) return;
    __syncthreads();  // dlogits may be logits, and the target's was read by all
    // p - 1 cancels where the model is sure: in double.
    const auto own = static_cast<float>((exp(of_target) / sum - 1) * static_cast<double>(scale));
    const auto factor = static_cast<float>(static_cast<double>(scale) / sum);
    for (int64_t c = threadIdx.x; c < logits.cols; c += kThreads) {
        store(c == target ? own : expf(in[c] - top) * factor, dlogits, row, c);
    }
}

// One thread adds in row order; the others only fetch.
__global__ void sum_kernel(const double* losses, int64_t rows, double* loss_sum) {
    __shared__ double room[kThreads];
    double sum = *loss_sum;
    for (int64_t first = 0; first < rows; first += kThreads) {
        const int64_t i = first + threadIdx.x;
        if (i < rows) room[threadIdx.x] = losses[i];
        __syncthreads();
        if (threadIdx.x == 0) {
            const int64_t count = min(static_cast<int64_t>(kThreads), rows - first);
            for (int64_t k = 0; k < count; ++k) sum += room[k];
        }
        __syncthreads();
    }
    if (threadIdx.x == 0) *loss_sum = sum;
}

}  // namespace

void cross_entropy(ConstView logits, const int32_t* targets, float scale, View dlogits,
                   double* loss_sum, double* losses, cudaStream_t stream) {
    FERRY_CHECK(logits.type == DType::f32 && logits.cols > 0);
    if (logits.rows == 0) return;
    row_kernel<<<blocks_for(logits.rows, 1), kThreads, 0, stream>>>(logits, targets, scale, dlogits,
                                                                    losses);
    sum_kernel<<<1, kThreads, 0, stream>>>(losses, logits.rows, loss_sum);
    check_launch("cross-entropy");
}

}  // namespace ferry::ops::cuda
