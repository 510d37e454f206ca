// Rows of a norm's backward pass that lie whole: bf16, packs at multiples of 16 bytes. No pack has
// a branch of its own, and the next rows are under way in shared memory.
#pragma once

#include <cuda_pipeline.h>

#include "norms.h"
#include "ops/cuda/shared/early_start.h"

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
// The runs of a group, one after the other, and the next one's packs on their way.
template <class Norm, int kRow, int kHeld>
struct WholeRuns {
    static constexpr int kThreads = block_of(kRow);
    const Norm& norm;
    const Backward& a;
    int64_t end;
    uint32_t row, col, my_col;
    bool has[kHeld];

    __device__ WholeRuns(const Norm& n, const Backward& all, int64_t first, int64_t behind)
        : norm(n), a(all), end(behind) {
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
    __device__ void start(const ConstView& v, bool there, uint4* to) const {
        const char* from = at(v);
#pragma unroll
        for (int k = 0; k < kHeld; ++k)
            start_pack(to + k * kThreads, from + k * kRow * kPack * 2, there && has[k]);
    }
    // The i-th run is the one stepped to. Its own numbers come back.
    __device__ NormRow start(int64_t i, uint4* to) const {
        const bool there = i < end;
        start(a.dy, there, to);
        start(a.x, there, to + kHeld * kThreads);
        if (a.addend.data != nullptr) start(a.addend, there, to + 2 * kHeld * kThreads);
        __pipeline_commit();
        return there ? norm.row(i) : NormRow{};
    }
};

}  // namespace ferry::ops::cuda
