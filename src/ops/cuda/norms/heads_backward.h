// A norm's backward pass over heads that lie whole, and their rotation. Rows are so short that
// several have to be under way: a ring of them is, in shared memory.
#pragma once

#include "whole_sums.h"

namespace ferry::ops::cuda {

constexpr int kHeadRow = 8, kHeadPacks = 2;  // the plan of a head: threads, and packs of each
constexpr int kHeadThreads = block_of(kHeadRow);
constexpr int kRing = 4;                                    // heads of a ring
constexpr int kRingPlaces = 2 * kHeadPacks * kHeadThreads;  // of one, of 16 bytes
constexpr int64_t kRingRoom = int64_t{kRing} * kRingPlaces * 16;
static_assert(kRingRoom >= int64_t{kHeadThreads} * kHeadPacks * kPack * 4,
              "room for a block's sums");

// A thread's packs of a head. All heads have one weight.
struct Head {
    uint4 d[kHeadPacks], x[kHeadPacks];
    NormRow row;
};
struct HeadWeight {
    uint4 packs[kHeadPacks];
    bool has[kHeadPacks];  // a short head has one pack
};

// The sums over a head, in each of its threads.
template <class Norm>
__device__ void add_head(const Head& head, const HeadWeight& weight, Pack (&sums)[kHeadPacks],
                         double (&totals)[Norm::kSums]) {
    float own[Norm::kSums] = {};
#pragma unroll
    for (int k = 0; k < kHeadPacks; ++k) {
        const Pack d = wide(head.d[k]), x = wide(head.x[k]), w = wide(weight.packs[k]);
        float more[Norm::kSums];
#pragma unroll
        for (int n = 0; n < Norm::kSums; ++n) more[n] = own[n];
#pragma unroll
        for (int e = 0; e < kPack; ++e) {
            sums[k].at[e] = fmaf(Norm::normed(x.at[e], head.row), d.at[e], sums[k].at[e]);
            Norm::add(w.at[e], d.at[e], x.at[e], head.row, more);
        }
#pragma unroll
        for (int n = 0; n < Norm::kSums; ++n) own[n] = weight.has[k] ? more[n] : own[n];
    }
    for (int n = 0; n < Norm::kSums; ++n) totals[n] = static_cast<double>(own[n]);
    row_sums<kHeadRow>(totals);
}

template <class Norm>
__device__ void store_head(const Head& head, const HeadWeight& weight, bool there,
                           const float (&levels)[Norm::kSums], const char* out) {
#pragma unroll
    for (int k = 0; k < kHeadPacks; ++k) {
        const Pack d = wide(head.d[k]), x = wide(head.x[k]), w = wide(weight.packs[k]);
        Pack result;
#pragma unroll
        for (int e = 0; e < kPack; ++e) {
            // Added to nothing, as elsewhere: -0 becomes +0.
            result.at[e] = 0.0f + Norm::own(w.at[e], d.at[e], x.at[e], head.row, levels);
        }
        store_if(there && weight.has[k], out + k * kHeadRow * kPack * 2, bf16_words(result));
    }
}

// backward_sums_kernel's results, bit for bit. Each turn takes a head out of the ring and starts
// the one kRing - 1 behind it.
template <class Norm>
__global__ void __launch_bounds__(kHeadThreads, resident(kHeadPacks, Lie::whole) / kHeadThreads)
    heads_sums_kernel(Norm norm, Backward a) {
    extern __shared__ uint4 room[];
    wait_for_last();
    let_next_start();
    const int64_t first = group_index<kHeadRow>() * a.rows_of_group, cols = a.weight.cols;
    const int64_t end = min(first + a.rows_of_group, int64_t{a.runs.count});
    const auto turns = static_cast<int>(a.rows_of_group);
    const auto heads = static_cast<int>(max(end - first, int64_t{0}));
    WholeRuns<Norm, kHeadRow, kHeadPacks> runs(norm, a, first, end), ahead = runs;
    const auto* weights = reinterpret_cast<const uint4*>(bf16_at(a.weight, 0, runs.my_col));
    const HeadWeight weight{
        {runs.has[0] ? weights[0] : uint4{}, runs.has[1] ? weights[kHeadRow] : uint4{}},
        {runs.has[0], runs.has[1]}};
    HeadAngles angles;
    Pack sums[kHeadPacks] = {};
    uint4* mine = room + threadIdx.x;
    NormRow rows[kRing];
    const auto start_next = [&](int i, int place) {
        rows[place] = ahead.start(first + i, mine + place * kRingPlaces);
        ahead.step();
    };
#pragma unroll
    for (int s = 0; s < kRing - 1; ++s) start_next(s, s);
    for (int begin = 0; begin < turns; begin += kRing) {
#pragma unroll
        for (int s = 0; s < kRing; ++s) {
            if (begin + s >= turns) break;  // all threads together
            start_next(begin + s + kRing - 1, (s + kRing - 1) % kRing);
            __pipeline_wait_prior(kRing - 1);
            const bool there = begin + s < heads;
            const uint4* at = mine + s * kRingPlaces;
            Head head{
                {at[0], at[kHeadThreads]}, {at[2 * kHeadThreads], at[3 * kHeadThreads]}, rows[s]};
            if (a.rotation.angles != nullptr && there)
                angles.turn(a.rotation, runs.row, head.d[0], head.d[1]);
            double totals[Norm::kSums];
            add_head<Norm>(head, weight, sums, totals);
            if (a.dx.data != nullptr) {
                float levels[Norm::kSums];
                Norm::divide(totals, head.row, a.share, levels);
                store_head<Norm>(head, weight, there, levels, runs.at(a.dx));
            }
            runs.step();
        }
    }
    __pipeline_wait_prior(0);
    put_sums<kHeadRow, kHeadPacks, Lie::whole>(sums, cols, a.partial + int64_t{blockIdx.x} * cols,
                                               room);
}

}  // namespace ferry::ops::cuda
