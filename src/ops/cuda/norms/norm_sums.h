// The backward pass of norms over rows of any type, with the sums of the gradients of weight and
// bias.
#pragma once

#include "norm_backward.h"

namespace ferry::ops::cuda {

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
        [[maybe_unused]] NormRow of_next{};
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

}  // namespace ferry::ops::cuda
