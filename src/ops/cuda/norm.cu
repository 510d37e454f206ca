// RMSNorm and LayerNorm, a block of threads a row. A row of RMSNorm is a run of the weight's
// length, such as a head. Sums over rows are made in two passes of fixed order.
#include "kernels.h"
#include "launch.h"
#include "pack.h"

namespace ferry::ops::cuda {
namespace {

constexpr int kThreads = 256;

// The i-th run of n columns: where it begins.
struct Run {
    int64_t row, col;
};
__device__ Run run_of(const ConstView& v, int64_t i, int64_t n) {
    const int64_t runs = v.cols / n;
    return {i / runs, i % runs * n};
}

__global__ void forward_kernel(ConstView x, ConstView weight, double eps, View y, float* rstd) {
    const int64_t n = weight.cols;
    const Run run = run_of(x, blockIdx.x, n);
    float squares = 0;
    each_pack<kThreads>(n, [&](int64_t col, int count) {
        const Pack pack = load_pack(x, run.row, run.col + col, count);
        for (int i = 0; i < kPack; ++i) squares += pack.at[i] * pack.at[i];
    });
    const double mean = block_sum<kThreads>(static_cast<double>(squares)) / static_cast<double>(n);
    const auto r = static_cast<float>(1 / sqrt(mean + eps));
    if (threadIdx.x == 0) rstd[blockIdx.x] = r;
    each_pack<kThreads>(n, [&](int64_t col, int count) {
        Pack pack = load_pack(x, run.row, run.col + col, count);
        const Pack w = load_pack(weight, 0, col, count);
        for (int i = 0; i < kPack; ++i) pack.at[i] = pack.at[i] * r * w.at[i];
        store_pack(pack, y, run.row, run.col + col);
    });
}

__global__ void backward_kernel(ConstView dy, ConstView x, ConstView weight, const float* rstd,
                                ConstView addend, View dx) {
    const int64_t n = weight.cols;
    const Run run = run_of(x, blockIdx.x, n);
    const float r = rstd[blockIdx.x];
    float dot = 0;
    each_pack<kThreads>(n, [&](int64_t col, int count) {
        const Pack w = load_pack(weight, 0, col, count);
        const Pack d = load_pack(dy, run.row, run.col + col, count);
        const Pack in = load_pack(x, run.row, run.col + col, count);
        for (int i = 0; i < kPack; ++i) dot += w.at[i] * d.at[i] * in.at[i];
    });
    const double wide = r, total = block_sum<kThreads>(static_cast<double>(dot));
    const auto pull = static_cast<float>(wide * wide * wide * total / static_cast<double>(n));
    each_pack<kThreads>(n, [&](int64_t col, int count) {
        const int64_t at = run.col + col;
        const Pack w = load_pack(weight, 0, col, count), d = load_pack(dy, run.row, at, count);
        Pack out = load_pack(x, run.row, at, count), before{};
        if (addend.data != nullptr) before = load_pack(addend, run.row, at, count);
        for (int i = 0; i < kPack; ++i) {
            const float own = w.at[i] * d.at[i] * r - out.at[i] * pull;
            out.at[i] = before.at[i] + own;
        }
        store_pack(out, dx, run.row, at);
    });
}

__global__ void layer_forward_kernel(ConstView x, ConstView weight, ConstView bias, double eps,
                                     View y, float* stats) {
    const int64_t row = blockIdx.x;
    const auto n = static_cast<double>(x.cols);
    float sum = 0, squares = 0;
    each_pack<kThreads>(x.cols, [&](int64_t col, int count) {
        const Pack in = load_pack(x, row, col, count);
        for (int i = 0; i < kPack; ++i) sum += in.at[i];
    });
    const auto mean = static_cast<float>(block_sum<kThreads>(static_cast<double>(sum)) / n);
    each_pack<kThreads>(x.cols, [&](int64_t col, int count) {
        const Pack in = load_pack(x, row, col, count);
        for (int i = 0; i < count; ++i) squares += (in.at[i] - mean) * (in.at[i] - mean);
    });
    const double variance = block_sum<kThreads>(static_cast<double>(squares)) / n;
    const auto r = static_cast<float>(1 / sqrt(variance + eps));
    if (threadIdx.x == 0) {
        stats[row] = mean;
        stats[x.rows + row] = r;
    }
    each_pack<kThreads>(x.cols, [&](int64_t col, int count) {
        Pack pack = load_pack(x, row, col, count);
        const Pack w = load_pack(weight, 0, col, count), b = load_pack(bias, 0, col, count);
        for (int i = 0; i < kPack; ++i) pack.at[i] = (pack.at[i] - mean) * r * w.at[i] + b.at[i];
        store_pack(pack, y, row, col);
    });
}

__global__ void layer_backward_kernel(ConstView dy, ConstView x, ConstView weight,
                                      const float* stats, ConstView addend, View dx) {
    const int64_t row = blockIdx.x;
    const auto n = static_cast<double>(x.cols);
    const float mean = stats[row], r = stats[x.rows + row];
    float sum = 0, dot = 0;
    each_pack<kThreads>(x.cols, [&](int64_t col, int count) {
        const Pack w = load_pack(weight, 0, col, count), d = load_pack(dy, row, col, count);
        const Pack in = load_pack(x, row, col, count);
        for (int i = 0; i < kPack; ++i) {
            const float slope = w.at[i] * d.at[i];
            sum += slope;
            dot += slope * ((in.at[i] - mean) * r);
        }
    });
    const auto level = static_cast<float>(block_sum<kThreads>(static_cast<double>(sum)) / n);
    const auto tilt = static_cast<float>(block_sum<kThreads>(static_cast<double>(dot)) / n);
    each_pack<kThreads>(x.cols, [&](int64_t col, int count) {
        const Pack w = load_pack(weight, 0, col, count), d = load_pack(dy, row, col, count);
        Pack out = load_pack(x, row, col, count), before{};
        if (addend.data != nullptr) before = load_pack(addend, row, col, count);
        for (int i = 0; i < kPack; ++i) {
            const float normed = (out.at[i] - mean) * r;
            out.at[i] = before.at[i] + r * (w.at[i] * d.at[i] - level - normed * tilt);
        }
        store_pack(out, dx, row, col);
    });
}

// What the gradients of a pack of columns sum over rows.
struct RmsTerm {
    ConstView dy, x;
    const float* rstd;
    int64_t n;
    __device__ Pack operator()(int64_t i, int64_t col, int count) const {
        const Run run = run_of(x, i, n);
        Pack in = load_pack(x, run.row, run.col + col, count);
        const Pack d = load_pack(dy, run.row, run.col + col, count);
        for (int k = 0; k < kPack; ++k) in.at[k] = in.at[k] * rstd[i] * d.at[k];
        return in;
    }
};
struct LayerTerm {
    ConstView dy, x;
    const float* stats;
    __device__ Pack operator()(int64_t i, int64_t col, int count) const {
        Pack in = load_pack(x, i, col, count);
        const Pack d = load_pack(dy, i, col, count);
        for (int k = 0; k < kPack; ++k)
            in.at[k] = (in.at[k] - stats[i]) * stats[x.rows + i] * d.at[k];
        return in;
    }
};
struct PlainTerm {
    ConstView x;
    __device__ Pack operator()(int64_t i, int64_t col, int count) const {
        return load_pack(x, i, col, count);
    }
};

// A thread a pack of columns, over kNormRows rows.
template <class Term>
__global__ void partial_kernel(Term term, int64_t rows, int64_t cols, float* partial) {
    const int64_t col = (int64_t{blockIdx.y} * kThreads + threadIdx.x) * kPack;
    if (col >= cols) return;
    const int count = pack_count(cols, col);
    const int64_t first = int64_t{blockIdx.x} * kNormRows, last = min(first + kNormRows, rows);
    Pack sum{};
    sum.count = count;
    for (int64_t row = first; row < last; ++row) {
        const Pack one = term(row, col, count);
        for (int i = 0; i < kPack; ++i) sum.at[i] += one.at[i];
    }
    store_pack_of(sum, partial + int64_t{blockIdx.x} * cols + col);
}

__global__ void gradient_kernel(const float* partial, int64_t blocks, int64_t cols,
                                float* gradient) {
    const int64_t col = int64_t{blockIdx.x} * kThreads + threadIdx.x;
    if (col >= cols) return;
    double sum = 0;
    for (int64_t b = 0; b < blocks; ++b) sum += static_cast<double>(partial[b * cols + col]);
    gradient[col] = static_cast<float>(static_cast<double>(gradient[col]) + sum);
}

template <class Term>
void add_sums(const Term& term, int64_t rows, int64_t cols, float* partial, float* sums,
              cudaStream_t stream) {
    const unsigned down = blocks_for(rows, kNormRows), across = blocks_for(cols, kThreads * kPack);
    partial_kernel<<<dim3(down, across), kThreads, 0, stream>>>(term, rows, cols, partial);
    gradient_kernel<<<blocks_for(cols, kThreads), kThreads, 0, stream>>>(partial, down, cols, sums);
}

}  // namespace

void norm_forward(ConstView x, ConstView weight, double eps, View y, float* rstd,
                  cudaStream_t stream) {
    if (x.rows == 0) return;
    const int64_t rows = x.rows * (x.cols / weight.cols);
    forward_kernel<<<blocks_for(rows, 1), kThreads, 0, stream>>>(x, weight, eps, y, rstd);
    check_launch("norm forward");
}

void norm_backward(ConstView dy, ConstView x, ConstView weight, const float* rstd, ConstView addend,
                   View dx, float* weight_gradient, float* partial, cudaStream_t stream) {
    if (x.rows == 0) return;
    const int64_t n = weight.cols, rows = x.rows * (x.cols / n);
    if (weight_gradient != nullptr)
        add_sums(RmsTerm{dy, x, rstd, n}, rows, n, partial, weight_gradient, stream);
    if (dx.data != nullptr) {
        backward_kernel<<<blocks_for(rows, 1), kThreads, 0, stream>>>(dy, x, weight, rstd, addend,
                                                                      dx);
    }
    check_launch("norm backward");
}

void layer_norm_forward(ConstView x, ConstView weight, ConstView bias, double eps, View y,
                        float* stats, cudaStream_t stream) {
    if (x.rows == 0) return;
    layer_forward_kernel<<<blocks_for(x.rows, 1), kThreads, 0, stream>>>(x, weight, bias, eps, y,
                                                                         stats);
    check_launch("layer norm forward");
}

void layer_norm_backward(ConstView dy, ConstView x, ConstView weight, const float* stats,
                         ConstView addend, View dx, float* weight_gradient, float* partial,
                         cudaStream_t stream) {
    if (x.rows == 0) return;
    if (weight_gradient != nullptr)
        add_sums(LayerTerm{dy, x, stats}, x.rows, x.cols, partial, weight_gradient, stream);
    if (dx.data != nullptr) {
        layer_backward_kernel<<<blocks_for(x.rows, 1), kThreads, 0, stream>>>(dy, x, weight, stats,
                                                                              addend, dx);
    }
    check_launch("layer norm backward");
}

void sum_rows(ConstView x, float* sums, float* partial, cudaStream_t stream) {
    if (x.rows == 0 || x.cols == 0) return;
    add_sums(PlainTerm{x}, x.rows, x.cols, partial, sums, stream);
    check_launch("sum of rows");
}

}  // namespace ferry::ops::cuda
