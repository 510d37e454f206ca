// Rows of a norm's backward pass that lie whole: bf16, packs at multiples of 16 bytes. No pack has
// a branch of its own, and the next rows are under way in shared memory.
#pragma once

#include <type_traits>
#include <utility>

#include "norm_backward.h"

namespace ferry::ops::cuda {

// Packs that all threads of a row have, however long the row: the plan before has room for fewer.
constexpr int sure_packs(int row, int held) {
    if (row == 8 || (row == 32 && held == 3)) return 0;
    return row == 256 ? 2 : held - 1;
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
__device__ inline Pack wide(const uint4& raw) { return widen_pack({raw, {}}, DType::bf16, kPack); }

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
    __device__ Row start(int64_t i, uint4* to) const {
        const bool there = i < end;
        start(a.dy, there, to);
        start(a.x, there, to + kHeld * kThreads);
        if (a.addend.data != nullptr) start(a.addend, there, to + 2 * kHeld * kThreads);
        __pipeline_commit();
        return there ? norm.row(i) : Row{};
    }
};

// The same results as backward_sums_kernel's, bit for bit, in 60 % of its instructions: no pack has
// a branch of its own, and addresses follow from row and column. Both passes over a row read it in
// shared memory, for registers are full of sums.
template <class Norm, int kRow, int kHeld>
__global__ void __launch_bounds__(block_of(kRow), resident(kHeld, Lie::whole) / block_of(kRow))
    whole_sums_kernel(Norm norm, Backward a) {
    using S = Summing<kRow, kHeld, Lie::whole>;
    constexpr int kThreads = block_of(kRow);
    extern __shared__ uint4 room[];
    wait_for_last();
    let_next_start();
    const int64_t first = group_index<kRow>() * a.rows_of_group, cols = a.weight.cols;
    WholeRuns<Norm, kRow, kHeld> runs(norm, a, first,
                                      min(first + a.rows_of_group, int64_t{a.runs.count}));
    const auto* weights = reinterpret_cast<const uint4*>(bf16_at(a.weight, 0, runs.my_col));
    const auto weight = [&](int k) { return runs.has[k] ? weights[k * kRow] : uint4{}; };
    Pack sums[kHeld] = {};
    uint4* mine = room + threadIdx.x;
    uint4* others = mine + S::kPlaces * kThreads;
    Row next = runs.start(first, mine);
    for (int64_t i = first; i < first + a.rows_of_group; ++i) {  // all threads of a warp together
        const Row row = next;
        const bool there = i < runs.end;
        const char* out = runs.at(a.dx);
        __pipeline_wait_prior(0);
        runs.step();
        next = runs.start(i + 1, others);
        uint4 d[kHeld], x[kHeld];
        const auto take = [&](int k) {
            d[k] = mine[k * kThreads];
            x[k] = mine[(kHeld + k) * kThreads];
        };
        float row_own[Norm::kSums] = {}, levels[Norm::kSums];
        double totals[Norm::kSums];
#pragma unroll
        for (int k = 0; k < kHeld; ++k) {
            take(k);
            const Pack dp = wide(d[k]), xp = wide(x[k]);
            const Pack w = wide(weight(k));
            float more[Norm::kSums];
#pragma unroll
            for (int s = 0; s < Norm::kSums; ++s) more[s] = row_own[s];
#pragma unroll
            for (int e = 0; e < kPack; ++e) {
                sums[k].at[e] = fmaf(Norm::normed(xp.at[e], row), dp.at[e], sums[k].at[e]);
                Norm::add(w.at[e], dp.at[e], xp.at[e], row, more);
            }
#pragma unroll
            for (int s = 0; s < Norm::kSums; ++s) row_own[s] = runs.has[k] ? more[s] : row_own[s];
        }
        // Read again, not kept: what is widened has no room in registers.
        asm volatile("" ::: "memory");
        for (int s = 0; s < Norm::kSums; ++s) totals[s] = static_cast<double>(row_own[s]);
        row_sums<kRow>(totals);
        if (a.dx.data != nullptr) {
            Norm::divide(totals, row, a.share, levels);
#pragma unroll
            for (int k = 0; k < kHeld; ++k) {
                take(k);
                const uint4 before =
                    a.addend.data != nullptr ? mine[(2 * kHeld + k) * kThreads] : uint4{};
                const Pack dp = wide(d[k]), bp = wide(before);
                const Pack w = wide(weight(k));
                Pack xp = wide(x[k]);
#pragma unroll
                for (int e = 0; e < kPack; ++e) {
                    const float own = Norm::own(w.at[e], dp.at[e], xp.at[e], row, levels);
                    xp.at[e] = bp.at[e] + own;
                }
                store_if(there && runs.has[k], out + k * kRow * kPack * 2, bf16_words(xp));
            }
        }
        std::swap(mine, others);
    }
    __pipeline_wait_prior(0);
    put_sums<kRow, kHeld, Lie::whole>(sums, cols, a.partial + int64_t{blockIdx.x} * cols, room);
}

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

// Adds a pack of a row to the sums of weight and bias, and to the row's own.
template <class Norm>
__device__ void add_pack(const uint4& raw_d, const uint4& raw_x, const uint4& raw_w, Row row,
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
__device__ uint4 result_of(const uint4& raw_d, const uint4& raw_x, const uint4& raw_w,
                           const uint4& raw_before, Row row, const float (&levels)[Norm::kSums]) {
    uint32_t words[kPack / 2];
    each_half([&](auto half) {
        const Half d = half_of<half>(raw_d), x = half_of<half>(raw_x), w = half_of<half>(raw_w);
        const Half before = half_of<half>(raw_before);
        Half out;
#pragma unroll
        for (int e = 0; e < kPack / 2; ++e) {
            const float own = Norm::own(w.at[e], d.at[e], x.at[e], row, levels);
            out.at[e] = before.at[e] + own;
        }
        words[2 * half] = pair_of(out.at[0], out.at[1], DType::bf16);
        words[2 * half + 1] = pair_of(out.at[2], out.at[3], DType::bf16);
    });
    return make_uint4(words[0], words[1], words[2], words[3]);
}

// The same of layer norms: registers hold the sums of weight and bias, and half a pack of a row.
template <class Norm, int kRow, int kHeld>
__global__ void __launch_bounds__(block_of(kRow), resident(kHeld, Lie::whole) / block_of(kRow))
    whole_biased_sums_kernel(Norm norm, Backward a) {
    using S = Summing<kRow, kHeld, Lie::whole>;
    constexpr int kThreads = block_of(kRow);
    extern __shared__ uint4 room[];
    wait_for_last();
    let_next_start();
    const int64_t first = group_index<kRow>() * a.rows_of_group, cols = a.weight.cols;
    WholeRuns<Norm, kRow, kHeld> runs(norm, a, first,
                                      min(first + a.rows_of_group, int64_t{a.runs.count}));
    const auto* weights = reinterpret_cast<const uint4*>(bf16_at(a.weight, 0, runs.my_col));
    const auto weight = [&](int k) { return runs.has[k] ? weights[k * kRow] : uint4{}; };
    Pack sums[kHeld] = {}, bias[kHeld] = {};
    uint4* mine = room + threadIdx.x;
    uint4* others = mine + S::kPlaces * kThreads;
    Row next = runs.start(first, mine);
    for (int64_t i = first; i < first + a.rows_of_group; ++i) {  // all threads of a warp together
        const Row row = next;
        const bool there = i < runs.end;
        const char* out = runs.at(a.dx);
        __pipeline_wait_prior(0);
        runs.step();
        next = runs.start(i + 1, others);
        float row_own[Norm::kSums] = {}, levels[Norm::kSums];
        double totals[Norm::kSums];
#pragma unroll
        for (int k = 0; k < kHeld; ++k) {
            float more[Norm::kSums];
#pragma unroll
            for (int s = 0; s < Norm::kSums; ++s) more[s] = row_own[s];
            add_pack<Norm>(mine[k * kThreads], mine[(kHeld + k) * kThreads], weight(k), row,
                           sums[k], bias[k], more);
#pragma unroll
            for (int s = 0; s < Norm::kSums; ++s) row_own[s] = runs.has[k] ? more[s] : row_own[s];
        }
        asm volatile("" ::: "memory");  // read again, not kept
        for (int s = 0; s < Norm::kSums; ++s) totals[s] = static_cast<double>(row_own[s]);
        row_sums<kRow>(totals);
        if constexpr (kRow <= 32) __syncwarp();  // what is read again would come too early
        if (a.dx.data != nullptr) {
            Norm::divide(totals, row, a.share, levels);
#pragma unroll
            for (int k = 0; k < kHeld; ++k) {
                const uint4 before =
                    a.addend.data != nullptr ? mine[(2 * kHeld + k) * kThreads] : uint4{};
                store_if(there && runs.has[k], out + k * kRow * kPack * 2,
                         result_of<Norm>(mine[k * kThreads], mine[(kHeld + k) * kThreads],
                                         weight(k), before, row, levels));
            }
        }
        std::swap(mine, others);
    }
    __pipeline_wait_prior(0);
    put_sums<kRow, kHeld, Lie::whole>(sums, cols, a.partial + int64_t{blockIdx.x} * cols, room);
    if (a.bias_partial == nullptr) return;
    put_sums<kRow, kHeld, Lie::whole>(bias, cols, a.bias_partial + int64_t{blockIdx.x} * cols,
                                      room);
}

}  // namespace ferry::ops::cuda
