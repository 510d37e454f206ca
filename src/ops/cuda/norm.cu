// RMSNorm, a block of threads a row. The weight's gradient is summed in two passes of fixed order.
#include "element.h"
#include "kernels.h"
#include "launch.h"

namespace ferry::ops::cuda {
namespace {

constexpr int kThreads = 256;

__global__ void forward_kernel(ConstView x, ConstView weight, double eps, View y, float* rstd) {
    const int64_t row = blockIdx.x;
    float squares = 0;
    for (int64_t c = threadIdx.x; c < x.cols; c += kThreads) {
        const float value = load(x, row, c);
        squares += value * value;
    }
    const double mean =
        block_sum<kThreads>(static_cast<double>(squares)) / static_cast<double>(x.cols);
    const auto r = static_cast<float>(1 / sqrt(mean + eps));
    if (threadIdx.x == 0) rstd[row] = r;
    for (int64_t c = threadIdx.x; c < x.cols; c += kThreads) {
        store(load(x, row, c) * r * load(weight, 0, c), y, row, c);
    }
}

__global__ void backward_kernel(ConstView dy, ConstView x, ConstView weight, const float* rstd,
                                ConstView addend, View dx) {
    const int64_t row = blockIdx.x;
    const float r = rstd[row];
    float dot = 0;
    for (int64_t c = threadIdx.x; c < x.cols; c += kThreads) {
        dot += load(weight, 0, c) * load(dy, row, c) * load(x, row, c);
    }
    const double wide = r, total = block_sum<kThreads>(static_cast<double>(dot));
    const auto pull = static_cast<float>(wide * wide * wide * total / static_cast<double>(x.cols));
    for (int64_t c = threadIdx.x; c < x.cols; c += kThreads) {
        const float own = load(weight, 0, c) * load(dy, row, c) * r - load(x, row, c) * pull;
        const float before = addend.data != nullptr ? load(addend, row, c) : 0.0f;
        store(before + own, dx, row, c);
    }
}

// A thread a column, over kNormRows rows.
__global__ void partial_kernel(ConstView dy, ConstView x, const float* rstd, float* partial) {
    const int64_t col = int64_t{blockIdx.x} * kThreads + threadIdx.x;
    if (col >= x.cols) return;
    const int64_t first = int64_t{blockIdx.y} * kNormRows;
    const int64_t last = min(first + kNormRows, x.rows);
    float sum = 0;
    for (int64_t row = first; row < last; ++row) {
        sum += load(x, row, col) * rstd[row] * load(dy, row, col);
    }
    partial[int64_t{blockIdx.y} * x.cols + col] = sum;
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
        const unsigned across = blocks_for(x.cols, kThreads), down = blocks_for(x.rows, kNormRows);
        partial_kernel<<<dim3(across, down), kThreads, 0, stream>>>(dy, x, rstd, partial);
        gradient_kernel<<<across, kThreads, 0, stream>>>(partial, down, x.cols, weight_gradient);
    }
    if (dx.data != nullptr) {
        backward_kernel<<<blocks_for(x.rows, 1), kThreads, 0, stream>>>(dy, x, weight, rstd, addend,
                                                                        dx);
    }
    check_launch("norm backward");
}

}  // namespace ferry::ops::cuda
