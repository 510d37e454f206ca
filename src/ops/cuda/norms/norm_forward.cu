// RMSNorm and LayerNorm, forward.
#include "norm_row.h"
#include "ops/cuda/shared/early_start.h"
#include "ops/cuda/shared/kernels.h"
#include "rotation.h"

namespace ferry::ops::cuda {
namespace {

template <int kRow, int kHeld, Lie kLie>
__global__ void __launch_bounds__(block_of(kRow))
    forward_kernel(ConstView x, ConstView weight, double eps, double share, View y, float* rstd,
                   Runs runs, Rotation rotation) {
    const int64_t i = group_index<kRow>(), n = i < runs.count ? weight.cols : 0;
    const Run run = runs(i);
    HeldRow<kRow, kHeld, kLie> in;
    wait_for_last();
    let_next_start();
    in.fetch(x, run, n);
    float squares = 0;
    each_held<kRow, kHeld, kLie>(n, [&](int k, int64_t col, int count) {
        const Pack pack = in.at(x, k, col, count);
#pragma unroll
        for (int e = 0; e < kPack; ++e) squares += pack.at[e] * pack.at[e];
    });
    const double total = row_sum<kRow>(static_cast<double>(squares));
    const double mean = share > 0 ? total * share : total / static_cast<double>(weight.cols);
    const auto r = static_cast<float>(1 / sqrt(mean + eps));
    if (threadIdx.x % kRow == 0 && n > 0) rstd[i] = r;
    if constexpr (rotates<kRow, kHeld, kLie>()) {
        if (rotation.angles != nullptr) {
            Pack halves[kHeld];
            if (n == 0) return;
            each_held<kRow, kHeld, kLie>(n, [&](int k, int64_t col, int count) {
                halves[k] = in.at(x, k, col, count);
                const Pack w = load_as<kLie>(weight, 0, col, count);
#pragma unroll
                for (int e = 0; e < kPack; ++e)
                    halves[k].at[e] = rounded(halves[k].at[e] * r * w.at[e], DType::bf16);
            });
            rotate_packs(rotation, run.row, halves[0], halves[1]);
            each_held<kRow, kHeld, kLie>(n, [&](int k, int64_t col, int) {
                store_as<kLie>(halves[k], y, run.row, run.col + col);
            });
            return;
        }
    }
    each_held<kRow, kHeld, kLie>(n, [&](int k, int64_t col, int count) {
        Pack pack = in.at(x, k, col, count);
        const Pack w = load_as<kLie>(weight, 0, col, count);
#pragma unroll
        for (int e = 0; e < kPack; ++e) pack.at[e] = pack.at[e] * r * w.at[e];
        store_as<kLie>(pack, y, run.row, run.col + col);
    });
}

template <int kRow, int kHeld, Lie kLie>
__global__ void __launch_bounds__(block_of(kRow))
    layer_forward_kernel(ConstView x, ConstView weight, ConstView bias, double eps, double share,
                         View y, float* stats) {
    const int64_t row = group_index<kRow>(), n = row < x.rows ? x.cols : 0;
    HeldRow<kRow, kHeld, kLie> in;
    wait_for_last();
    let_next_start();
    in.fetch(x, {row, 0}, n);
    float sum = 0, squares = 0;
    each_held<kRow, kHeld, kLie>(n, [&](int k, int64_t col, int count) {
        const Pack pack = in.at(x, k, col, count);
#pragma unroll
        for (int e = 0; e < kPack; ++e) sum += pack.at[e];
    });
    const auto mean = static_cast<float>(row_sum<kRow>(static_cast<double>(sum)) * share);
    each_held<kRow, kHeld, kLie>(n, [&](int k, int64_t col, int count) {
        const Pack pack = in.at(x, k, col, count);
#pragma unroll
        for (int e = 0; e < kPack; ++e) {
            if (e < count) squares += (pack.at[e] - mean) * (pack.at[e] - mean);
        }
    });
    const double variance = row_sum<kRow>(static_cast<double>(squares)) * share;
    const auto r = static_cast<float>(1 / sqrt(variance + eps));
    if (threadIdx.x % kRow == 0 && n > 0) {
        stats[row] = mean;
        stats[x.rows + row] = r;
    }
    each_held<kRow, kHeld, kLie>(n, [&](int k, int64_t col, int count) {
        Pack pack = in.at(x, k, col, count);
        const Pack w = load_as<kLie>(weight, 0, col, count), b = load_as<kLie>(bias, 0, col, count);
#pragma unroll
        for (int e = 0; e < kPack; ++e) pack.at[e] = (pack.at[e] - mean) * r * w.at[e] + b.at[e];
        store_as<kLie>(pack, y, row, col);
    });
}

// 1 / n where a product with it is the quotient, bit for bit: n is a power of two. Else 0. A
// division of doubles is a good part of a short row's instructions.
double exact_share(int64_t n) { return (n & (n - 1)) == 0 ? 1.0 / static_cast<double>(n) : 0; }

void run_forward(ConstView x, ConstView weight, double eps, View y, float* rstd,
                 const Rotation& rotation, cudaStream_t stream) {
    const Runs runs = runs_of(x, weight.cols);
    const Lie lie = lie_of(weight.cols, any_wide(x), x, weight, y);
    with_plan(weight.cols, lie, [&](auto plan) {
        using P = decltype(plan);
        start(forward_kernel<P::kRow, P::kHeld, P::kLie>, P::blocks(runs.count), P::kThreads, 0,
              stream, x, weight, eps, exact_share(weight.cols), y, rstd, runs, rotation);
    });
}

}  // namespace

void norm_forward(ConstView x, ConstView weight, double eps, View y, float* rstd,
                  cudaStream_t stream) {
    if (x.rows == 0) return;
    run_forward(x, weight, eps, y, rstd, {}, stream);
    check_launch("norm forward");
}

bool norm_rope_forward(ConstView x, ConstView weight, double eps, View y, float* rstd,
                       const Rope& rope, const float* angles, cudaStream_t stream) {
    if (x.rows == 0) return true;
    if (!rotates_heads(angles, weight.cols) || !lies_whole(x) || !lies_whole(weight) ||
        !lies_whole(y))
        return false;
    run_forward(x, weight, eps, y, rstd, rotation_of(rope, angles), stream);
    check_launch("norm and rope forward");
    return true;
}

void layer_norm_forward(ConstView x, ConstView weight, ConstView bias, double eps, View y,
                        float* stats, cudaStream_t stream) {
    if (x.rows == 0) return;
    const Lie lie = lie_of(x.cols, any_wide(x), x, weight, bias, y);
    const double share = 1.0 / static_cast<double>(x.cols);
    with_plan(x.cols, lie, [&](auto plan) {
        using P = decltype(plan);
        start(layer_forward_kernel<P::kRow, P::kHeld, P::kLie>, P::blocks(x.rows), P::kThreads, 0,
              stream, x, weight, bias, eps, share, y, stats);
    });
    check_launch("layer norm forward");
}

}  // namespace ferry::ops::cuda
