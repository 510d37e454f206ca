// The backward pass of norms over rows that lie whole, with the sums of the gradients of weight and
// bias: the results of backward_sums_kernel, bit for bit, in 60 to 70 % of its instructions.
#pragma once

#include <type_traits>
#include <utility>

#include "norm_sums.h"
#include "whole_runs.h"

namespace ferry::ops::cuda {

__device__ inline Pack wide(const uint4& raw) { return widen_pack({raw, {}}, DType::bf16, kPack); }

// Four neighbours of a pack, so that few of them are wide at once.
struct Half {
    float at[kPack / 2];
};
template <int kHalf>
__device__ Half half_of(const uint4& raw) {
    const uint32_t low = kHalf == 0 ? raw.x : raw.z, high = kHalf == 0 ? raw.y : raw.w;
    return {{__uint_as_float(low << 16), __uint_as_float(low & 0xffff0000U),
             __uint_as_float(high << 16), __uint_as_float(high & 0xffff0000U)}};
}
template <class Body>
__device__ void each_half(Body body) {
    body(std::integral_constant<int, 0>());
    body(std::integral_constant<int, 1>());
}
template <int kHalf>
__device__ void put_half(const Half& half, uint4& raw) {
    (kHalf == 0 ? raw.x : raw.z) = pair_of(half.at[0], half.at[1], DType::bf16);
    (kHalf == 0 ? raw.y : raw.w) = pair_of(half.at[2], half.at[3], DType::bf16);
}

// Adds a pack of a row to the sums of weight and bias, and to the row's own.
template <class Norm>
__device__ void add_halves(const uint4& raw_d, const uint4& raw_x, const uint4& raw_w, NormRow row,
                           Pack& sums, Pack& bias, float (&row_own)[Norm::kSums]) {
    each_half([&](auto half) {
        const Half d = half_of<half>(raw_d), x = half_of<half>(raw_x), w = half_of<half>(raw_w);
#pragma unroll
        for (int e = 0; e < kPack / 2; ++e) {
            float& sum = sums.at[half * kPack / 2 + e];
            sum = fmaf(Norm::normed(x.at[e], row), d.at[e], sum);
            bias.at[half * kPack / 2 + e] += d.at[e];
            Norm::add(w.at[e], d.at[e], x.at[e], row, row_own);
        }
    });
}
// And what becomes of it.
template <class Norm>
__device__ uint4 result_of_halves(const uint4& raw_before, const uint4& raw_d, const uint4& raw_x,
                                  const uint4& raw_w, NormRow row,
                                  const float (&levels)[Norm::kSums]) {
    uint4 result;
    each_half([&](auto half) {
        const Half d = half_of<half>(raw_d), x = half_of<half>(raw_x), w = half_of<half>(raw_w);
        const Half before = half_of<half>(raw_before);
        Half out;
#pragma unroll
        for (int e = 0; e < kPack / 2; ++e) {
            const float own = Norm::own(w.at[e], d.at[e], x.at[e], row, levels);
            out.at[e] = before.at[e] + own;
        }
        put_half<half>(out, result);
    });
    return result;
}

// The same two of a whole pack at once, where there is no bias.
template <class Norm>
__device__ void add_pack(const uint4& raw_d, const uint4& raw_x, const uint4& raw_w, NormRow row,
                         Pack& sums, float (&row_own)[Norm::kSums]) {
    const Pack d = wide(raw_d), x = wide(raw_x), w = wide(raw_w);
#pragma unroll
    for (int e = 0; e < kPack; ++e) {
        sums.at[e] = fmaf(Norm::normed(x.at[e], row), d.at[e], sums.at[e]);
        Norm::add(w.at[e], d.at[e], x.at[e], row, row_own);
    }
}
template <class Norm>
__device__ uint4 result_of_pack(const uint4& raw_before, const uint4& raw_d, const uint4& raw_x,
                                const uint4& raw_w, NormRow row,
                                const float (&levels)[Norm::kSums]) {
    const Pack d = wide(raw_d), before = wide(raw_before), w = wide(raw_w);
    Pack x = wide(raw_x);
#pragma unroll
    for (int e = 0; e < kPack; ++e) {
        const float own = Norm::own(w.at[e], d.at[e], x.at[e], row, levels);
        x.at[e] = before.at[e] + own;
    }
    return bf16_words(x);
}

// No pack has a branch of its own, and addresses follow from row and column. Both passes over a row
// read it in shared memory, for registers are full of sums. Where these hold sums of a bias too,
// half a pack is at work at a time.
template <class Norm, int kRow, int kHeld>
__global__ void __launch_bounds__(block_of(kRow), resident(kHeld, Lie::whole) / block_of(kRow))
    whole_sums_kernel(Norm norm, Backward a) {
    constexpr int kThreads = block_of(kRow);
    extern __shared__ uint4 room[];
    wait_for_last();
    let_next_start();
    const int64_t first = group_index<kRow>() * a.rows_of_group, cols = a.weight.cols;
    WholeRuns<Norm, kRow, kHeld> runs(norm, a, first,
                                      min(first + a.rows_of_group, int64_t{a.runs.count}));
    const auto* weights = reinterpret_cast<const uint4*>(bf16_at(a.weight, 0, runs.my_col));
    const auto weight = [&](int k) { return runs.has[k] ? weights[k * kRow] : uint4{}; };
    Pack sums[kHeld] = {}, bias[Norm::kBiased ? kHeld : 1] = {};
    uint4* mine = room + threadIdx.x;
    uint4* others = mine + whole_places(kHeld) * kThreads;
    NormRow next = runs.start(first, mine);
    for (int64_t i = first; i < first + a.rows_of_group; ++i) {  // all threads of a warp together
        const NormRow row = next;
        const bool there = i < runs.end;
        const char* out = runs.at(a.dx);
        __pipeline_wait_prior(0);
        runs.step();
        next = runs.start(i + 1, others);
        const uint4 *x = mine + kHeld * kThreads, *addend = x + kHeld * kThreads;
        float row_own[Norm::kSums] = {}, levels[Norm::kSums];
        double totals[Norm::kSums];
#pragma unroll
        for (int k = 0; k < kHeld; ++k) {
            float more[Norm::kSums];
#pragma unroll
            for (int s = 0; s < Norm::kSums; ++s) more[s] = row_own[s];
            if constexpr (Norm::kBiased) {
                add_halves<Norm>(mine[k * kThreads], x[k * kThreads], weight(k), row, sums[k],
                                 bias[k], more);
            } else {
                add_pack<Norm>(mine[k * kThreads], x[k * kThreads], weight(k), row, sums[k], more);
            }
#pragma unroll
            for (int s = 0; s < Norm::kSums; ++s) row_own[s] = runs.has[k] ? more[s] : row_own[s];
        }
        // Read again, not kept: what is widened has no room in registers.
        asm volatile("" ::: "memory");
        for (int s = 0; s < Norm::kSums; ++s) totals[s] = static_cast<double>(row_own[s]);
        row_sums<kRow>(totals);
        if constexpr (Norm::kBiased && kRow <= 32) __syncwarp();  // else it would be too early
        if (a.dx.data != nullptr) {
            Norm::divide(totals, row, a.share, levels);
#pragma unroll
            for (int k = 0; k < kHeld; ++k) {
                const auto before = [&] {
                    return a.addend.data != nullptr ? addend[k * kThreads] : uint4{};
                };
                if constexpr (Norm::kBiased) {
                    store_if(there && runs.has[k], out + k * kRow * kPack * 2,
                             result_of_halves<Norm>(before(), mine[k * kThreads], x[k * kThreads],
                                                    weight(k), row, levels));
                } else {
                    const uint4 d = mine[k * kThreads], raw = x[k * kThreads];
                    store_if(there && runs.has[k], out + k * kRow * kPack * 2,
                             result_of_pack<Norm>(before(), d, raw, weight(k), row, levels));
                }
            }
        }
        std::swap(mine, others);
    }
    __pipeline_wait_prior(0);
    put_sums<kRow, kHeld, Lie::whole>(sums, cols, a.partial + int64_t{blockIdx.x} * cols, room);
    if constexpr (Norm::kBiased) {
        if (a.bias_partial == nullptr) return;
        put_sums<kRow, kHeld, Lie::whole>(bias, cols, a.bias_partial + int64_t{blockIdx.x} * cols,
                                          room);
    }
}

}  // namespace ferry::ops::cuda
