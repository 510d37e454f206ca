// RMSNorm and LayerNorm, backward: what rows are to both, and kernels for rows of any type.
#pragma once

#include <cuda_pipeline.h>

#include <algorithm>

#include "norm_row.h"
#include "rotation.h"
#include "sums_of_rows.h"

namespace ferry::ops::cuda {

// The sums of a norm's backward pass over a row, and what follows from them.
struct Row {
    float mean, r;
};
struct Rms {
    static constexpr int kSums = 1;
    static constexpr bool kBiased = false;
    const float* rstd;
    __device__ Row row(int64_t i) const { return {0, rstd[i]}; }
    __device__ static void add(float w, float d, float x, Row, float (&sums)[kSums]) {
        sums[0] += w * d * x;
    }
    __device__ static void divide(const double (&totals)[kSums], Row row, double share,
                                  float (&levels)[kSums]) {
        const double wide = row.r;
        levels[0] = static_cast<float>(wide * wide * wide * totals[0] * share);
    }
    __device__ static float own(float w, float d, float x, Row row, const float (&levels)[kSums]) {
        return w * d * row.r - x * levels[0];
    }
    __device__ static float normed(float x, Row row) { return x * row.r; }
};
struct Layered {
    static constexpr int kSums = 2;
    static constexpr bool kBiased = true;
    const float* stats;
    int64_t rows;
    __device__ Row row(int64_t i) const { return {stats[i], stats[rows + i]}; }
    __device__ static void add(float w, float d, float x, Row row, float (&sums)[kSums]) {
        const float slope = w * d;
        sums[0] += slope;
        sums[1] += slope * normed(x, row);
    }
    __device__ static void divide(const double (&totals)[kSums], Row, double share,
                                  float (&levels)[kSums]) {
        for (int k = 0; k < kSums; ++k) levels[k] = static_cast<float>(totals[k] * share);
    }
    __device__ static float own(float w, float d, float x, Row row, const float (&levels)[kSums]) {
        return row.r * (w * d - levels[0] - normed(x, row) * levels[1]);
    }
    __device__ static float normed(float x, Row row) { return (x - row.mean) * row.r; }
};

struct Backward {
    ConstView dy, x, weight, addend;
    View dx;
    Runs runs;
    double share;    // 1 / n
    float* partial;  // partial sums of the weight's gradient
    float* bias_partial = nullptr;
    Rotation rotation{};        // of dy, before all else
    int64_t rows_of_group = 0;  // where the same kernel sums the weight's gradient
};

// The shared memory of a row.
template <class Norm, int kRow, int kHeld, Lie kLie>
struct Inputs {
    using Held = HeldRow<kRow, kHeld, kLie>;
    Held d, x, before;
    Row row{};
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
    static __device__ Row start(const Norm& norm, const Backward& a, int64_t i, int64_t n,
                                uint4* room) {
        if (n == 0) return {};
        const Run run = a.runs(i);
        Held::start(a.dy, run, n, room);
        Held::start(a.x, run, n, room + places_of(kHeld, kLie) * blockDim.x);
        if (a.addend.data != nullptr)
            Held::start(a.addend, run, n, room + 2 * places_of(kHeld, kLie) * blockDim.x);
        return norm.row(i);
    }
    __device__ void take(const Backward& a, int64_t i, Row of_row, const uint4* room) {
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

// How the rows of a block that sums the weight's gradient lie: each group has some, one after the
// other, and the block's sum over them is one partial sum. Of many rows groups have more than
// kRowsOfGroup, so that all blocks are at work from the start: the fewer partial sums, the better.
template <int kRow, int kHeld, Lie kLie>
struct Summing {
    static constexpr int kGroups = block_of(kRow) / kRow;
    static constexpr int kRowsOfGroup = kGroups == 1 || kRow < 32 ? 16 : 8;
    static constexpr int kRows = kGroups * kRowsOfGroup;
    static_assert(kRows >= kNormRows, "scratch has room for a partial sum of kNormRows");
    // The next row is under way in shared memory while one is worked on in registers.
    static constexpr int kPlaces = 3 * places_of(kHeld, kLie);
    static constexpr bool kAhead = kPlaces <= 12;
    static constexpr int64_t kRowRoom = int64_t{block_of(kRow)} * kPlaces * 16;
    static constexpr int64_t kRoom = std::max<int64_t>(
        kAhead ? kRowRoom : 0, kGroups > 1 ? block_of(kRow) * kHeld * kPack * 4 : 0);
    // Behind it, the sums of the bias's gradient: registers have no room for them too.
    static constexpr int64_t kBiasRoom = block_of(kRow) * kHeld * kPack * 4;
    // Whether a kernel of whole_runs.h does it, which has both rows in shared memory.
    static constexpr bool kWhole = kLie == Lie::whole && kHeld > 2;
    template <class Norm>
    static constexpr int64_t room() {
        if (kWhole) return 2 * kRowRoom;
        return kRoom + (Norm::kBiased ? kBiasRoom : 0);
    }
};

// A thread's own sums in shared memory, four floats of a pack at a time, so that neighbours' lie
// next to each other.
template <int kRow, int kHeld, Lie kLie>
struct BiasSums {
    float4* at;  // null: nobody asks for them
    __device__ BiasSums(const Backward& a, uint4* room)
        : at(a.bias_partial == nullptr ? nullptr
                                       : reinterpret_cast<float4*>(room) +
                                             Summing<kRow, kHeld, kLie>::kRoom / 16 + threadIdx.x) {
        for (int k = 0; at != nullptr && k < 2 * kHeld; ++k) *place(k) = make_float4(0, 0, 0, 0);
    }
    __device__ float4* place(int half) const { return at + half * block_of(kRow); }
    __device__ void add(int k, const Pack& d) const {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            float4 sum = *place(2 * k + half);
            const float* more = d.at + 4 * half;
            sum.x += more[0], sum.y += more[1], sum.z += more[2], sum.w += more[3];
            *place(2 * k + half) = sum;
        }
    }
    __device__ void take(Pack (&sums)[kHeld]) const {
#pragma unroll
        for (int i = 0; i < 2 * kHeld; ++i) {
            const float4 sum = *place(i);
            float* to = sums[i / 2].at + i % 2 * 4;
            to[0] = sum.x, to[1] = sum.y, to[2] = sum.z, to[3] = sum.w;
        }
    }
};

// The sums of a block's rows, [cols], of those of its groups, in order.
template <int kRow, int kHeld, Lie kLie>
__device__ void put_sums(Pack (&sums)[kHeld], int64_t cols, float* partial, uint4* room) {
    using S = Summing<kRow, kHeld, kLie>;
    if constexpr (S::kGroups == 1) {
        each_held<kRow, kHeld, kLie>(cols, [&](int k, int64_t col, int count) {
            if (k < 0) return;
            sums[k].count = count;
            put_pack(sums[k], partial + col, DType::f32);
        });
    } else {
        constexpr int kWidth = kRow * kHeld * kPack;
        auto* of_groups = reinterpret_cast<float*>(room);
        __syncthreads();  // all have taken what was there
        each_held<kRow, kHeld, kLie>(cols, [&](int k, int64_t col, int) {
            if (k < 0) return;
            sums[k].count = kPack;
            const auto group = static_cast<int>(threadIdx.x) / kRow;
            put_pack(sums[k], of_groups + group * kWidth + col, DType::f32);
        });
        __syncthreads();
        for (int64_t col = threadIdx.x; col < cols; col += block_of(kRow)) {
            float sum = 0;
            for (int group = 0; group < S::kGroups; ++group) sum += of_groups[group * kWidth + col];
            partial[col] = sum;
        }
    }
}

// Threads of a multiprocessor that find registers for what they hold: the more of them, the more
// memory is under way. 512 for all but the widest rows, where much would lie in memory instead.
constexpr int resident(int held, Lie lie) { return held == 4 && lie == Lie::any ? 256 : 512; }

// The same and, of the same reads, the sums of the gradients of weight and bias. Columns: all held.
template <class Norm, int kRow, int kHeld, Lie kLie>
__global__ void __launch_bounds__(block_of(kRow), resident(kHeld, kLie) / block_of(kRow))
    backward_sums_kernel(Norm norm, Backward a) {
    using S = Summing<kRow, kHeld, kLie>;
    using In = Inputs<Norm, kRow, kHeld, kLie>;
    extern __shared__ uint4 room[];
    wait_for_last();
    let_next_start();
    const int64_t first = group_index<kRow>() * a.rows_of_group, cols = a.weight.cols;
    const int64_t end = min(first + a.rows_of_group, int64_t{a.runs.count});
    const auto columns = [&](int64_t i) { return i < end ? cols : 0; };
    Pack sums[kHeld] = {};
    [[maybe_unused]] const BiasSums<kRow, kHeld, kLie> bias(a, room);
    In in;
    in.fetch(norm, a, first, columns(first));
    for (int64_t i = first; i < first + a.rows_of_group; ++i) {  // all threads of a warp together
        const int64_t n = columns(i), next = columns(i + 1);
        [[maybe_unused]] Row of_next{};
        if constexpr (S::kAhead) {
            of_next = In::start(norm, a, i + 1, next, room);
            __pipeline_commit();
        }
        backward_row(a, in, n, [&](int k, const Pack& d, const Pack& x) {
            if (k < 0) return;
#pragma unroll
            for (int e = 0; e < kPack; ++e)
                sums[k].at[e] = fmaf(Norm::normed(x.at[e], in.row), d.at[e], sums[k].at[e]);
            if constexpr (Norm::kBiased) {
                if (bias.at != nullptr) bias.add(k, d);
            }
        });
        if constexpr (S::kAhead) {
            __pipeline_wait_prior(0);
            if (next > 0) in.take(a, i + 1, of_next, room);
        } else {
            in.fetch(norm, a, i + 1, next);
        }
    }
    put_sums<kRow, kHeld, kLie>(sums, cols, a.partial + int64_t{blockIdx.x} * cols, room);
    if constexpr (Norm::kBiased) {
        if (a.bias_partial == nullptr) return;
        bias.take(sums);
        put_sums<kRow, kHeld, kLie>(sums, cols, a.bias_partial + int64_t{blockIdx.x} * cols, room);
    }
}

// The gradients of a pack of columns, summed over rows.
template <class Norm>
struct NormTerm {
    Norm norm;
    ConstView dy, x;
    Runs runs;
    static constexpr int kTogether = 2;
    struct Raw {
        RawPack x, d;
        Row row;
    };
    __device__ Raw fetch(int64_t i, int64_t col, int count) const {
        const Run run = runs(i);
        return {fetch_pack(x, run.row, run.col + col, count),
                fetch_pack(dy, run.row, run.col + col, count), norm.row(i)};
    }
    __device__ void add(const Raw& raw, int count, Pack& sum) const {
        const Pack in = widen_pack(raw.x, x.type, count), d = widen_pack(raw.d, dy.type, count);
#pragma unroll
        for (int e = 0; e < kPack; ++e)
            sum.at[e] = fmaf(Norm::normed(in.at[e], raw.row), d.at[e], sum.at[e]);
    }
};

}  // namespace ferry::ops::cuda
