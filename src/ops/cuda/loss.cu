// Softmax cross-entropy, a block of threads a row.
#include <cfloat>

#include "kernels.h"
#include "launch.h"
#include "pack.h"

namespace ferry::ops::cuda {
namespace {

constexpr int kThreads = 256;

// A thread's elements of a row, kThreads apart: the largest, and the sum of exp(element - largest).
// One pass: where a later element is larger, what was summed before shrinks.
struct Softened {
    float top = -FLT_MAX, sum = 0;
};
__device__ Softened soften(const float* in, int64_t cols) {
    constexpr int kAtOnce = 16;  // loads that are under way together
    Softened own;
    for (int64_t first = threadIdx.x; first < cols; first += int64_t{kAtOnce} * kThreads) {
        float x[kAtOnce];
#pragma unroll
        for (int k = 0; k < kAtOnce; ++k) {
            const int64_t c = first + int64_t{k} * kThreads;
            x[k] = c < cols ? in[c] : -INFINITY;
        }
        float top = own.top;
#pragma unroll
        for (int k = 0; k < kAtOnce; ++k) top = fmaxf(top, x[k]);
        own.sum *= expf(own.top - top);
        own.top = top;
#pragma unroll
        for (int k = 0; k < kAtOnce; ++k) own.sum += expf(x[k] - top);
    }
    return own;
}

struct Slope {
    float top, factor, own;
    int32_t target;
    __device__ float operator()(float logit, int64_t c) const {
        return c == target ? own : expf(logit - top) * factor;
    }
};

// In eights where rows begin at multiples of 16 bytes; else neighbours by neighbouring threads.
__device__ void store_slopes(const ConstView& logits, const View& to, int64_t row,
                             const Slope& slope) {
    const void *in = place_of(logits, row, 0), *out = place_of(to, row, 0);
    if (to.cols % kPack == 0 && whole(in, kPack) && whole(out, kPack)) {
        each_pack<kThreads>(to.cols, [&](int64_t col, int count) {
            Pack pack = load_pack(logits, row, col, count);
#pragma unroll
            for (int k = 0; k < kPack; ++k) pack.at[k] = slope(pack.at[k], col + k);
            store_pack(pack, to, row, col);
        });
        return;
    }
    const auto* values = static_cast<const float*>(in);
#pragma unroll 8
    for (int64_t c = threadIdx.x; c < to.cols; c += kThreads)
        store(slope(values[c], c), to, row, c);
}

__global__ void __launch_bounds__(kThreads) row_kernel(ConstView logits, const int32_t* targets,
                                                       float scale, View dlogits, double* losses) {
    const int64_t row = blockIdx.x;
    const int32_t target = targets[row];
    if (target < 0) {
        if (threadIdx.x == 0) losses[row] = 0;
        if (dlogits.data == nullptr) return;
        each_pack<kThreads>(dlogits.cols, [&](int64_t col, int count) {
            store_pack({{}, count}, dlogits, row, col);
        });
        return;
    }
    const float* in = static_cast<const float*>(logits.data) + row * logits.ld;
    const Softened own = soften(in, logits.cols);
    const float top = block_max<kThreads>(own.top);
    const double sum = block_sum<kThreads>(static_cast<double>(own.sum * expf(own.top - top)));
    const double of_target = static_cast<double>(in[target]) - static_cast<double>(top);
    if (threadIdx.x == 0) losses[row] = log(sum) - of_target;
    if (dlogits.data == nullptr) return;
    __syncthreads();  // dlogits may be logits, and the target's was read by all
    // p - 1 cancels where the model is sure: in double.
    const auto of_own = static_cast<float>((exp(of_target) / sum - 1) * static_cast<double>(scale));
    const auto factor = static_cast<float>(static_cast<double>(scale) / sum);
    store_slopes(logits, dlogits, row, {top, factor, of_own, target});
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
#pragma unroll 16
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
