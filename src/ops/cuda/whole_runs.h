// Rows of a norm's backward pass that lie whole: packs at multiples of 16 bytes, dy and weight in
// bf16, the others in bf16 or fp32. No pack has a branch of its own, and the next rows are under
// way in shared memory.
#pragma once

#include <cuda_pipeline.h>

#include <type_traits>

#include "early_start.h"
#include "norms.h"

namespace ferry::ops::cuda {

// Packs that all threads of a row have, however long the row: the plan before has room for fewer.
constexpr int sure_packs(int row, int held) {
    if (row == 8 || (row == 32 && held == 3)) return 0;
    return held == 4 && row == 256 ? 2 : held - 1;
}

template <class AnyView>
__device__ const char* bf16_at(const AnyView& v, uint32_t row, uint32_t col) {
    return static_cast<const char*>(v.data) + (row * v.ld + col) * 2;
}
template <class AnyView>
__device__ const char* fp32_at(const AnyView& v, uint32_t row, uint32_t col) {
    return static_cast<const char*>(v.data) + (row * v.ld + col) * 4;
}
// Zeros where nothing is there. Without a branch, as is the store below: what is between branches
// is under way alone.
__device__ inline void start_pack(uint4* to, const char* from, bool there) {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(
                     static_cast<uint32_t>(__cvta_generic_to_shared(to))),
                 "l"(from), "r"(there ? 16 : 0)
                 : "memory");
#else
    *to = there ? *reinterpret_cast<const uint4*>(from) : uint4{};
#endif
}
__device__ inline void store_if(bool there, const char* to, const uint4& v) {
    asm volatile(
        "{\n.reg .pred there;\nsetp.ne.u32 there, %0, 0;\n"
        "@there st.global.v4.b32 [%1], {%2, %3, %4, %5};\n}" ::"r"(static_cast<uint32_t>(there)),
        "l"(to), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
        : "memory");
}
// Packs of fp32, of a warp's 32 neighbours: each of them has two chunks of 16 bytes. Copies between
// the GPU's memory and shared memory take neighbouring chunks, so that a sector moves once. In
// shared memory a thread's first chunk lies in one plane of the block's places and its second one
// in the next, four places aside, so that neither copies nor threads meet in a bank.
template <int kRow, int kHeld>
struct Chunks {
    static constexpr int kThreads = block_of(kRow);
    uint32_t pack, packs;  // of this thread's first copy, and of a row
    int copied, mine;      // from this thread's place: its first copy, and its second chunk
    uint32_t col;          // where a warp's first pack begins, and this thread's chunk in it
    __device__ explicit Chunks(int64_t cols) {
        const int lane = static_cast<int>(threadIdx.x) % 32, odd = lane % 2;
        const auto first = static_cast<uint32_t>(threadIdx.x % kRow - threadIdx.x % 32);
        pack = first + static_cast<uint32_t>(lane / 2);
        packs = static_cast<uint32_t>(cols / kPack);
        copied = odd * kThreads + ((lane / 2) ^ (odd * 4)) - lane;
        mine = kThreads + (lane ^ 4) - lane;
        col = first * kPack + static_cast<uint32_t>(lane) * 4;
    }
    // Calls body(place, bytes, there) for each copy of a thread.
    template <class Body>
    __device__ void each(Body body) const {
#pragma unroll
        for (int k = 0; k < kHeld; ++k) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                body(copied + 2 * k * kThreads + half * 16, (k * kRow + half * 16) * kPack * 4,
                     pack + static_cast<uint32_t>(k * kRow + half * 16) < packs);
            }
        }
    }
    // A thread's own pack, of whose places `at` is the first.
    __device__ RawPack take(const uint4* at, int k) const {
        return {at[2 * k * kThreads], at[2 * k * kThreads + mine]};
    }
    __device__ void put(uint4* at, int k, const RawPack& pack_of_k) const {
        at[2 * k * kThreads] = pack_of_k.low;
        at[2 * k * kThreads + mine] = pack_of_k.high;
    }
};

// The runs of a group, one after the other, and the next one's packs on their way. kWide: x, addend
// and dx are fp32.
template <class Norm, int kRow, int kHeld, bool kWide = false>
struct WholeRuns {
    static constexpr int kThreads = block_of(kRow);
    static constexpr int kOfX = kHeld * (kWide ? 2 : 1);  // a thread's places of x, or of addend
    struct Nothing {
        __device__ explicit Nothing(int64_t) {}
    };
    const Norm& norm;
    const Backward& a;
    int64_t end;
    uint32_t row, col, my_col;
    bool has[kHeld];
    std::conditional_t<kWide, Chunks<kRow, kHeld>, Nothing> chunks;

    __device__ WholeRuns(const Norm& n, const Backward& all, int64_t first, int64_t behind)
        : norm(n), a(all), end(behind), chunks(all.weight.cols) {
        const Run run = a.runs(first < end ? first : 0);
        row = static_cast<uint32_t>(run.row), col = static_cast<uint32_t>(run.col);
        my_col = threadIdx.x % kRow * kPack;
#pragma unroll
        for (int k = 0; k < kHeld; ++k)
            has[k] = k < sure_packs(kRow, kHeld) || my_col + k * kRow * kPack < a.weight.cols;
    }
    __device__ void step() {
        col += static_cast<uint32_t>(a.weight.cols);
        if (col == static_cast<uint32_t>(a.runs.of_row * a.weight.cols)) col = 0, ++row;
    }
    template <class AnyView>
    __device__ const char* at(const AnyView& v) const {
        return bf16_at(v, row, col + my_col);
    }
    // Of x, addend and dx.
    template <class AnyView>
    __device__ const char* stream_at(const AnyView& v) const {
        if constexpr (kWide) return fp32_at(v, row, col + chunks.col);
        return at(v);
    }
    __device__ void start(const ConstView& v, bool there, uint4* to) const {
        const char* from = at(v);
#pragma unroll
        for (int k = 0; k < kHeld; ++k)
            start_pack(to + k * kThreads, from + k * kRow * kPack * 2, there && has[k]);
    }
    __device__ void start_stream(const ConstView& v, bool there, uint4* to) const {
        if constexpr (kWide) {
            const char* from = stream_at(v);
            chunks.each([&](int place, int bytes, bool in_row) {
                start_pack(to + place, from + bytes, there && in_row);
            });
        } else {
            start(v, there, to);
        }
    }
    // The i-th run is the one stepped to. Its own numbers come back.
    __device__ Row start(int64_t i, uint4* to) const {
        const bool there = i < end;
        start(a.dy, there, to);
        start_stream(a.x, there, to + kHeld * kThreads);
        if (a.addend.data != nullptr) start_stream(a.addend, there, to + (kHeld + kOfX) * kThreads);
        __pipeline_commit();
        return there ? norm.row(i) : Row{};
    }
    // A thread's pack of x or of addend, whose places begin at `of`.
    __device__ auto take(const uint4* of, int k) const {
        if constexpr (kWide) {
            return chunks.take(of, k);
        } else {
            return of[k * kThreads];
        }
    }
};

}  // namespace ferry::ops::cuda
