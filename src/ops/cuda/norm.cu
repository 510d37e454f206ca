// RMSNorm, a block of threads a row. The weight's gradient is summed in two passes of fixed order.
#include "kernels.h"
#include "launch.h"
#include "pack.h"

namespace ferry::ops::cuda {
namespace {

constexpr int kThreads = 256;

__global__ void forward_kernel(ConstView x, ConstView weight, double eps, View y, float* rstd) {
    const int64_t row = blockIdx.x;
    float squares = 0;
    each_pack<kThreads>(x.cols, [&](int64_t col, int count) {
        const Pack pack = load_pack(x, row, col, count);
        for (int i = 0; i < kPack; ++i) squares += pack.at[i] * pack.at[i];
    });
    const double mean =
        block_sum<kThreads>(static_cast<double>(squares)) / static_cast<double>(x.cols);
    const auto r = static_cast<float>(1 / sqrt(mean + eps));
    if (threadIdx.x == 0) rstd[row] = r;
    each_pack<kThreads>(x.cols, [&](int64_t col, int count) {
        Pack pack = load_pack(x, row, col, count);
        const Pack w = load_pack(weight, 0, col, count);
        for (int i = 0; i < kPack; ++i) pack.at[i] = pack.at[i] * r * w.at[i];
        store_pack(pack, y, row, col);
    });
}

__global__ void backward_kernel(ConstView dy, ConstView x, ConstView weight, const float* rstd,
                                ConstView addend, View dx) {
    const int64_t row = blockIdx.x;
    const float r = rstd[row];
    float dot = 0;
    each_pack<kThreads>(x.cols, [&](int64_t col, int count) {
        const Pack w = load_pack(weight, 0, col, count), d = load_pack(dy, row, col, count);
        const Pack in = load_pack(x, row, col, count);
        for (int i = 0; i < kPack; ++i) dot += w.at[i] * d.at[i] * in.at[i];
    });
    const double wide = r, total = block_sum<kThreads>(static_cast<double>(dot));
    const auto pull = static_cast<float>(wide * wide * wide * total / static_cast<double>(x.cols));
    each_pack<kThreads>(x.cols, [&](int64_t col, int count) {
        const Pack w = load_pack(weight, 0, col, count), d = load_pack(dy, row, col, count);
        Pack out = load_pack(x, row, col, count), before{};
        if (addend.data != nullptr) before = load_pack(addend, row, col, count);
        for (int i = 0; i < kPack; ++i) {
            const float own = w.at[i] * d.at[i] * r - out.at[i] * pull;
            out.at[i] = before.at[i] + own;
        }
        store_pack(out, dx, row, col);
    });
}

// A thread a pack of columns, over kNormRows rows.
__global__ void partial_kernel(ConstView dy, ConstView x, const float* rstd, float* partial) {
    const int64_t col = (int64_t{blockIdx.x} * kThreads + threadIdx.x) * kPack;
    if (col >= x.cols) return;
    const int count = pack_count(x.cols, col);
    const int64_t first = int64_t{blockIdx.y} * kNormRows;
    const int64_t last = min(first + kNormRows, x.rows);
    Pack sum{};
    sum.count = count;
    for (int64_t row = first; row < last; ++row) {
        const Pack in = load_pack(x, row, col, count), d = load_pack(dy, row, col, count);
        const float r = rstd[row];
        for (int i = 0; i < kPack; ++i) sum.at[i] += in.at[i] * r * d.at[i];
    }
    store_pack_of(sum, partial + int64_t{blockIdx.y} * x.cols + col);
}

__global__ void gradient_kernel(const float* partial, int64_t blocks, int64_t hidden,
                                float* gradient) {
    const int64_t col = int64_t{blockIdx.x} * kThreads + threadIdx.x;
    if (col >= hidden) return;
    double sum = 0;
    for (int64_t b = 0; b < blocks; ++b) sum += static_cast<double>(partial[b * hidden + col]);
    gradient[col] = static_cast<float>(static_cast<double>(gradient[col]) + sum);
}

}  // namespace

void norm_forward(ConstView x, ConstView weight, double eps, View y, float* rstd,
                  cudaStream_t stream) {
    if (x.rows == 0) return;
    forward_kernel<<<blocks_for(x.rows, 1), kThreads, 0, stream>>>(x, weight, eps, y, rstd);
    check_launch("norm forward");
}

void norm_backward(ConstView dy, ConstView x, ConstView weight, const float* rstd, ConstView addend,
                   View dx, float* weight_gradient, float* partial, cudaStream_t stream) {
    if (x.rows == 0) return;
    if (weight_gradient != nullptr) {
        const unsigned across = blocks_for(x.cols, kThreads * kPack);
        const unsigned down = blocks_for(x.rows, kNormRows);
        partial_kernel<<<dim3(across, down), kThreads, 0, stream>>>(dy, x, rstd, partial);
        gradient_kernel<<<blocks_for(x.cols, kThreads), kThreads, 0, stream>>>(
            partial, down, x.cols, weight_gradient);
    }
    if (dx.data != nullptr) {
        backward_kernel<<<blocks_for(x.rows, 1), kThreads, 0, stream>>>(dy, x, weight, rstd, addend,
                                                                        dx);
    }
    check_launch("norm backward");
}

}  // namespace ferry::ops::cuda
