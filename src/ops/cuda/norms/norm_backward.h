// The backward pass of norms over rows of any type, without the weight's gradient.
#pragma once

#include "norms.h"
#include "ops/cuda/shared/early_start.h"

namespace ferry::ops::cuda {

// The shared memory of a row.
template <class Norm, int kRow, int kHeld, Lie kLie>
struct Inputs {
    using Held = HeldRow<kRow, kHeld, kLie>;
    Held d, x, before;
    NormRow row{};
    __device__ void fetch(const Norm& norm, const Backward& a, int64_t i, int64_t n) {
        if (n == 0) return;
        row = norm.row(i);
        const Run run = a.runs(i);
        d.fetch(a.dy, run, n);
        x.fetch(a.x, run, n);
        if (a.addend.data != nullptr) before.fetch(a.addend, run, n);
        rotate(a, run);
    }
    // Into shared memory, three rows' places a thread; the row's own numbers come back.
    static __device__ NormRow start(const Norm& norm, const Backward& a, int64_t i, int64_t n,
                                    uint4* room) {
        if (n == 0) return {};
        const Run run = a.runs(i);
        Held::start(a.dy, run, n, room);
        Held::start(a.x, run, n, room + places_of(kHeld, kLie) * blockDim.x);
        if (a.addend.data != nullptr)
            Held::start(a.addend, run, n, room + 2 * places_of(kHeld, kLie) * blockDim.x);
        return norm.row(i);
    }
    __device__ void take(const Backward& a, int64_t i, NormRow of_row, const uint4* room) {
        const Run run = a.runs(i);
        row = of_row;
        d.take(run, room);
        x.take(run, room + places_of(kHeld, kLie) * blockDim.x);
        if (a.addend.data != nullptr)
            before.take(run, room + 2 * places_of(kHeld, kLie) * blockDim.x);
        rotate(a, run);
    }
    __device__ void rotate(const Backward& a, Run run) {
        if constexpr (rotates<kRow, kHeld, kLie>()) {
            if (a.rotation.angles == nullptr) return;
            Pack first = d.held(a.dy, 0, kPack), second = d.held(a.dy, 1, kPack);
            rotate_packs(a.rotation, run.row, first, second);
            d.low[0] = bf16_words(first);
            d.low[1] = bf16_words(second);
        }
    }
};

// also(k, d, x): for each pack of the row while it is at hand.
template <class Norm, int kRow, int kHeld, Lie kLie, class Also>
__device__ void backward_row(const Backward& a, const Inputs<Norm, kRow, kHeld, kLie>& in,
                             int64_t n, Also also) {
    float sums[Norm::kSums] = {}, levels[Norm::kSums];
    double totals[Norm::kSums];
    each_held<kRow, kHeld, kLie>(n, [&](int k, int64_t col, int count) {
        const Pack w = load_as<kLie>(a.weight, 0, col, count), d = in.d.at(a.dy, k, col, count);
        const Pack x = in.x.at(a.x, k, col, count);
        also(k, d, x);
#pragma unroll
        for (int e = 0; e < kPack; ++e) Norm::add(w.at[e], d.at[e], x.at[e], in.row, sums);
    });
    for (int k = 0; k < Norm::kSums; ++k) totals[k] = static_cast<double>(sums[k]);
    row_sums<kRow>(totals);
    if (a.dx.data == nullptr) return;
    Norm::divide(totals, in.row, a.share, levels);
    each_held<kRow, kHeld, kLie>(n, [&](int k, int64_t col, int count) {
        const Pack w = load_as<kLie>(a.weight, 0, col, count), d = in.d.at(a.dy, k, col, count);
        Pack out = in.x.at(a.x, k, col, count), before{};
        if (a.addend.data != nullptr) before = in.before.at(a.addend, k, col, count);
#pragma unroll
        for (int e = 0; e < kPack; ++e) {
            const float own = Norm::own(w.at[e], d.at[e], out.at[e], in.row, levels);
            out.at[e] = before.at[e] + own;
        }
        store_as<kLie>(out, a.dx, in.x.run.row, in.x.run.col + col);
    });
}

template <class Norm, int kRow, int kHeld, Lie kLie>
__global__ void __launch_bounds__(block_of(kRow)) backward_kernel(Norm norm, Backward a) {
    const int64_t i = group_index<kRow>(), n = i < a.runs.count ? a.weight.cols : 0;
    Inputs<Norm, kRow, kHeld, kLie> in;
    wait_for_last();
    in.fetch(norm, a, i, n);
    backward_row(a, in, n, [](int, const Pack&, const Pack&) {});
}

}  // namespace ferry::ops::cuda
