// How a group of threads has a row of a norm: read once, it stays in registers between its sums and
// its result. A row of RMSNorm is a run of the weight's length, such as a head.
#pragma once

#include <cuda_pipeline.h>

#include <cstdint>

#include "norm_plan.h"
#include "ops/cuda/shared/launch.h"
#include "ops/cuda/shared/pack.h"
#include "ops/view.h"

namespace ferry::ops::cuda {

// Runs of n columns, some a row: where the i-th begins. 32 bits, for a division of 64 costs as much
// as the rest of a narrow row.
struct Run {
    int64_t row, col;
};
struct Runs {
    int64_t n;
    uint32_t of_row, count;
    __device__ Run operator()(int64_t i) const {
        if (of_row == 1) return {i, 0};
        const auto at = static_cast<uint32_t>(i);
        return {at / of_row, at % of_row * n};
    }
};
inline Runs runs_of(const ConstView& x, int64_t n) {
    const int64_t of_row = x.cols / n;
    FERRY_CHECK(x.rows * of_row <= UINT32_MAX);
    return {n, static_cast<uint32_t>(of_row), static_cast<uint32_t>(x.rows * of_row)};
}

// The threads of a row wait for each other, not for other rows. Numbers of barriers are constants:
// by a number of run time a block takes all 16, and a multiprocessor has room for four blocks.
template <int kRow>
__device__ void meet_row() {
    constexpr int kGroups = block_of(kRow) / kRow;
    if constexpr (kGroups == 1) {
        __syncthreads();
    } else {
        static_assert(kGroups == 2);
        if (threadIdx.x < kRow) {
            asm volatile("bar.sync 1, %0;" ::"n"(kRow) : "memory");
        } else {
            asm volatile("bar.sync 2, %0;" ::"n"(kRow) : "memory");
        }
    }
}

// The sums over the kRow threads of a row, in each of them: a fixed tree in a warp, then the warps
// in order. Threads without elements add zeros. Which plan a row has, and so the order of its sum,
// follows from its length and its elements' width alone (with_plan).
template <int kRow, int kSums>
__device__ void row_sums(double (&values)[kSums]) {
    for (int half = min(kRow, 32) / 2; half > 0; half /= 2) {
#pragma unroll
        for (int k = 0; k < kSums; ++k) values[k] += __shfl_xor_sync(0xffffffffu, values[k], half);
    }
    if constexpr (kRow > 32) {
        constexpr int kWarps = kRow / 32;
        __shared__ double sums[kSums][kMostThreads / 32];
        const int warp = static_cast<int>(threadIdx.x) / 32, first = warp / kWarps * kWarps;
        meet_row<kRow>();  // the room may still be read by the sums before
        if (threadIdx.x % 32 == 0) {
            for (int k = 0; k < kSums; ++k) sums[k][warp] = values[k];
        }
        meet_row<kRow>();
#pragma unroll
        for (int k = 0; k < kSums; ++k) {
            values[k] = 0;
            for (int w = 0; w < kWarps; ++w) values[k] += sums[k][first + w];
        }
    }
}
template <int kRow>
__device__ double row_sum(double value) {
    double values[1] = {value};
    row_sums<kRow>(values);
    return values[0];
}

// How the columns of a row lie among the kRow threads of its group: packs of neighbours to
// neighbours. The first kHeld packs of a thread stay in registers; k is -1 behind them.
template <int kRow, int kHeld, Lie kLie, class Body>
__device__ void each_held(int64_t n, Body body) {
    const int64_t lane = static_cast<int>(threadIdx.x) % kRow;
#pragma unroll
    for (int k = 0; k < kHeld; ++k) {
        const int64_t col = (lane + int64_t{k} * kRow) * kPack;
        if (col < n) body(k, col, kLie == Lie::whole ? kPack : pack_count(n, col));
    }
    if constexpr (kLie != Lie::whole) {
        for (int64_t col = (lane + int64_t{kHeld} * kRow) * kPack; col < n; col += kRow * kPack)
            body(-1, col, pack_count(n, col));
    }
}

// A pack of a weight, and one of a result.
template <Lie kLie>
__device__ Pack load_as(const ConstView& v, int64_t row, int64_t col, int count) {
    if constexpr (kLie != Lie::whole) {
        return load_pack(v, row, col, count);
    } else {
        const auto* at = static_cast<const uint16_t*>(v.data) + row * v.ld + col;
        return widen_pack({*reinterpret_cast<const uint4*>(at), {}}, DType::bf16, kPack);
    }
}
template <Lie kLie>
__device__ void store_as(const Pack& pack, const View& v, int64_t row, int64_t col) {
    if constexpr (kLie != Lie::whole) {
        store_pack(pack, v, row, col);
    } else {
        uint32_t words[kPack / 2];
#pragma unroll
        for (int i = 0; i < kPack / 2; ++i)
            words[i] = pair_of(pack.at[2 * i], pack.at[2 * i + 1], DType::bf16);
        auto* at = static_cast<uint16_t*>(v.data) + row * v.ld + col;
        *reinterpret_cast<uint4*>(at) = make_uint4(words[0], words[1], words[2], words[3]);
    }
}

// Rows of 16-bit elements take half the registers, so that more of them are under way.
template <int kRow, int kHeld, Lie kLie>
struct HeldRow {
    static constexpr bool kWide = kLie == Lie::any;
    uint4 low[kHeld], high[kWide ? kHeld : 1];
    Run run;
    static __device__ DType type_of(const ConstView& v) {
        if constexpr (kWide) return v.type;
        if constexpr (kLie == Lie::whole) return DType::bf16;
        return v.type == DType::f16 ? DType::f16 : DType::bf16;
    }
    static __device__ const char* place(const ConstView& v, Run at, int64_t col) {
        const auto bytes = kWide ? size_of(v.type) : int64_t{2};
        return static_cast<const char*>(v.data) + (at.row * v.ld + at.col + col) * bytes;
    }
    static __device__ int64_t column(int k) {
        return (static_cast<int>(threadIdx.x) % kRow + int64_t{k} * kRow) * kPack;
    }
    __device__ void fetch(const ConstView& v, Run at, int64_t n) {
        run = at;
#pragma unroll
        for (int k = 0; k < kHeld; ++k) {
            const int64_t col = column(k);
            RawPack raw{};
            if constexpr (kLie == Lie::whole) {
                if (col < n) raw.low = *reinterpret_cast<const uint4*>(place(v, at, col));
            } else {
                if (col < n) raw = fetch_pack(place(v, at, col), type_of(v), pack_count(n, col));
            }
            low[k] = raw.low;
            if constexpr (kWide) high[k] = raw.high;
        }
    }
    // The same by way of the block's shared memory, a place of its own for each thread and pack:
    // start, some other work, wait for all (once for several rows), take.
    static __device__ void start(const ConstView& v, Run at, int64_t n, uint4* room) {
#pragma unroll
        for (int k = 0; k < kHeld; ++k) {
            const int64_t col = column(k);
            if (col >= n) continue;
            const char* from = place(v, at, col);
            const int count = kLie == Lie::whole ? kPack : pack_count(n, col);
            uint4* to = room + (k * static_cast<int>(blockDim.x) + static_cast<int>(threadIdx.x));
            uint4* behind = to + kHeld * static_cast<int>(blockDim.x);
            if (kLie == Lie::whole || whole(from, count)) {
                __pipeline_memcpy_async(to, from, 16);
                if (kWide && v.type == DType::f32) __pipeline_memcpy_async(behind, from + 16, 16);
            } else {
                const RawPack raw = fetch_pack(from, type_of(v), count);
                *to = raw.low;
                if constexpr (kWide) *behind = raw.high;
            }
        }
    }
    __device__ void take(Run at, const uint4* room) {
        run = at;
#pragma unroll
        for (int k = 0; k < kHeld; ++k) {
            const uint4* from =
                room + (k * static_cast<int>(blockDim.x) + static_cast<int>(threadIdx.x));
            low[k] = from[0];
            if constexpr (kWide) high[k] = from[kHeld * static_cast<int>(blockDim.x)];
        }
    }
    __device__ Pack held(const ConstView& v, int k, int count) const {
        return widen_pack({low[k], kWide ? high[kWide ? k : 0] : uint4{}}, type_of(v), count);
    }
    __device__ Pack at(const ConstView& v, int k, int64_t col, int count) const {
        if (k < 0) return load_pack(v, run.row, run.col + col, count);
        return held(v, k, count);
    }
};

// The run of this thread's group, and its columns: none behind the last run.
template <int kRow>
__device__ int64_t group_index() {
    return int64_t{blockIdx.x} * (block_of(kRow) / kRow) + static_cast<int>(threadIdx.x) / kRow;
}

// ---------------------------------------------------------------- launching

template <int kRowThreads, int kHeldPacks, Lie kRowsLie>
struct Plan {
    static constexpr int kRow = kRowThreads, kHeld = kHeldPacks;
    static constexpr Lie kLie = kRowsLie;
    static constexpr int kThreads = block_of(kRow);
    static unsigned blocks(int64_t rows) { return blocks_for(rows, kThreads / kRow); }
};

// call(Plan<...>()): as few threads for a row as can hold it, for what a thread does beside its
// elements is as much as three packs take. What a thread holds and adds follows from the length of
// a row and the width of its elements.
template <Lie kLie, class Call>
void with_narrow_plan(int64_t packs, const Call& call) {
    if (packs <= 16) return call(Plan<8, 2, kLie>());
    if (packs <= 96) return call(Plan<32, 3, kLie>());
    if (packs <= 128) return call(Plan<32, 4, kLie>());
    if (packs <= 192) return call(Plan<64, 3, kLie>());
    if (packs <= 256) return call(Plan<64, 4, kLie>());
    if (packs <= 384) return call(Plan<128, 3, kLie>());
    if (packs <= 512) return call(Plan<128, 4, kLie>());
    return call(Plan<256, 4, kLie>());
}
template <class Call>
void with_plan(int64_t n, Lie lie, const Call& call) {
    const int64_t packs = ceil_div(n, kPack);
    if (lie == Lie::whole) return with_narrow_plan<Lie::whole>(packs, call);
    if (lie == Lie::halves) return with_narrow_plan<Lie::halves>(packs, call);
    if (packs <= 16) return call(Plan<16, 1, Lie::any>());
    if (packs <= 128) return call(Plan<128, 1, Lie::any>());
    if (packs <= 256) return call(Plan<256, 1, Lie::any>());
    if (packs <= 512) return call(Plan<256, 2, Lie::any>());
    return call(Plan<256, 4, Lie::any>());
}

// Looks at the tensors with a place alone: a result or a weight of other elements does not make
// rows wide.
template <class AnyView>
bool lies_whole(const AnyView& v) {
    return v.data == nullptr || (v.type == DType::bf16 && v.ld % kPack == 0 &&
                                 reinterpret_cast<uintptr_t>(v.data) % 16 == 0);
}
template <class... Views>
bool any_wide(const Views&... views) {
    return ((views.data != nullptr && views.type == DType::f32) || ...);
}
template <class... Views>
Lie lie_of(int64_t n, bool wide, const Views&... views) {
    if (wide) return Lie::any;
    return n % kPack == 0 && n <= kMostHeld && (lies_whole(views) && ...) ? Lie::whole
                                                                          : Lie::halves;
}

}  // namespace ferry::ops::cuda
