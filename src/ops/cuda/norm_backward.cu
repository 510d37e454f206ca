// RMSNorm and LayerNorm, backward. Sums over rows are made in two passes of fixed order.
#include <cuda_pipeline.h>

#include <algorithm>
#include <utility>

#include "kernels.h"
#include "norm_row.h"
#include "rotation.h"

namespace ferry::ops::cuda {
namespace {

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

// A kernel's start costs nothing where it happens while the kernel before still runs, if the GPU
// can: blocks let the next kernel's come as soon as there is room, and touch no memory before the
// kernel before them is through.
__device__ void let_next_start() {
#if __CUDA_ARCH__ >= 900
    cudaTriggerProgrammaticLaunchCompletion();
#endif
}
__device__ void wait_for_last() {
#if __CUDA_ARCH__ >= 900
    cudaGridDependencySynchronize();
#endif
}
bool may_start_early() {
    int device = 0, major = 0;
    if (cudaGetDevice(&device) != cudaSuccess) return false;
    cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
    return major >= 9;
}
// Of a kernel that begins with wait_for_last. room: bytes of dynamic shared memory.
template <class... Parameters, class... Arguments>
void start(void (*kernel)(Parameters...), dim3 blocks, dim3 threads, int64_t room,
           cudaStream_t stream, const Arguments&... arguments) {
    cudaLaunchAttribute early{};
    early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    early.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config{};
    config.gridDim = blocks;
    config.blockDim = threads;
    config.dynamicSmemBytes = static_cast<size_t>(room);
    config.stream = stream;
    config.attrs = &early;
    config.numAttrs = may_start_early() ? 1 : 0;
    cudaLaunchKernelEx(&config, kernel, static_cast<Parameters>(arguments)...);
}

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
    // Whether whole_sums_kernel does it, which has both rows in shared memory. Layer norms and some
    // heads are slower by it.
    template <class Norm>
    static constexpr bool whole() {
        return kLie == Lie::whole && kHeld > 2 && !Norm::kBiased;
    }
    template <class Norm>
    static constexpr int64_t room() {
        if (whole<Norm>()) return 2 * kRowRoom;
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

// Of the GPU that blocks are counted for. A constant, so that sums do not depend on the GPU.
constexpr int kMultiprocessors = 132;

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

// ---------------------------------------------------------------- rows that lie whole

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

template <class Norm, class P>
auto sums_kernel() {
    if constexpr (Summing<P::kRow, P::kHeld, P::kLie>::template whole<Norm>()) {
        return whole_sums_kernel<Norm, P::kRow, P::kHeld>;
    } else {
        return backward_sums_kernel<Norm, P::kRow, P::kHeld, P::kLie>;
    }
}

// ---------------------------------------------------------------- sums over rows

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

// A block has kAcross packs of columns and kSumRows rows; each of kDown threads of a pack adds
// every kDown-th row, then these sums are added in order.
constexpr int kAcross = 16, kDown = 16, kSumRows = 64;
static_assert(kSumRows >= kNormRows, "scratch has room for a partial sum of kNormRows");
template <class Term>
__global__ void __launch_bounds__(kAcross* kDown)
    partial_kernel(Term term, int64_t rows, int64_t cols, float* partial) {
    constexpr int kWidth = kAcross * kPack;
    __shared__ float room[kDown][kWidth];
    wait_for_last();
    let_next_start();
    const int x = static_cast<int>(threadIdx.x) % kAcross;
    const int y = static_cast<int>(threadIdx.x) / kAcross;
    const int64_t begin = int64_t{blockIdx.y} * kWidth, col = begin + x * kPack;
    const int64_t first = int64_t{blockIdx.x} * kSumRows + y;
    const int64_t last = col < cols ? min(first - y + kSumRows, rows) : 0;
    const int count = pack_count(cols, col);
    Pack sum{};
    for (int64_t row = first; row < last; row += Term::kTogether * kDown) {
        typename Term::Raw raw[Term::kTogether];
#pragma unroll
        for (int k = 0; k < Term::kTogether; ++k) {
            if (row + k * kDown < last) raw[k] = term.fetch(row + k * kDown, col, count);
        }
#pragma unroll
        for (int k = 0; k < Term::kTogether; ++k) {
            if (row + k * kDown < last) term.add(raw[k], count, sum);
        }
    }
    sum.count = kPack;
    put_pack(sum, &room[y][x * kPack], DType::f32);
    __syncthreads();
    const int64_t mine = begin + threadIdx.x;
    if (threadIdx.x >= kWidth || mine >= cols) return;
    float total = 0;
    for (int part = 0; part < kDown; ++part) total += room[part][threadIdx.x];
    partial[int64_t{blockIdx.x} * cols + mine] = total;
}

// A sector's width of columns, for many blocks; each of kParts threads of a column adds a run of
// the partial sums in order, and the first adds the runs in order.
constexpr int kColumns = 8, kParts = 32;
__global__ void __launch_bounds__(kColumns* kParts)
    gradient_kernel(const float* partial, int64_t blocks, int64_t cols, Accumulator gradient) {
    __shared__ double sums[kParts][kColumns];
    wait_for_last();
    const int64_t col = int64_t{blockIdx.x} * kColumns + threadIdx.x;
    const int64_t run = (blocks + kParts - 1) / kParts, first = threadIdx.y * run;
    const float was = threadIdx.y == 0 && col < cols ? gradient.of(col) : 0;
    double sum = 0;
    if (col < cols) {
#pragma unroll 16
        for (int64_t b = first; b < min(first + run, blocks); ++b)
            sum += static_cast<double>(partial[b * cols + col]);
    }
    sums[threadIdx.y][threadIdx.x] = sum;
    __syncthreads();
    if (threadIdx.y != 0 || col >= cols) return;
    double total = 0;
    for (int part = 0; part < kParts; ++part) total += sums[part][threadIdx.x];
    gradient.at[col] = static_cast<float>(static_cast<double>(was) + total);
}

void add_partials(const float* partial, int64_t count, int64_t cols, Accumulator sums,
                  cudaStream_t stream) {
    start(gradient_kernel, blocks_for(cols, kColumns), dim3(kColumns, kParts), 0, stream, partial,
          count, cols, sums);
}

// Of no rows.
void add_nothing(int64_t cols, Accumulator sums, cudaStream_t stream) {
    if (sums.asked() && sums.fresh) add_partials(nullptr, 0, cols, sums, stream);
}

template <class Term>
void add_sums(const Term& term, int64_t rows, int64_t cols, float* partial, Accumulator sums,
              cudaStream_t stream) {
    const dim3 blocks(blocks_for(rows, kSumRows), blocks_for(cols, kAcross * kPack));
    start(partial_kernel<Term>, blocks, kAcross * kDown, 0, stream, term, rows, cols, partial);
    add_partials(partial, blocks.x, cols, sums, stream);
}

// ---------------------------------------------------------------- a bias's gradient

// A block has a strip of up to kStripPacks packs of columns, which lie next to each other, and a
// run of the rows. Each of kStripDown threads of a pack adds every kStripDown-th row, a batch at a
// time.
constexpr int kStripPacks = 64, kStripDown = 4, kStripThreads = kStripPacks * kStripDown;

// kWhole: bf16, all packs at multiples of 16 bytes.
template <bool kWhole>
struct StripBatch {
    static constexpr int kRows = kWhole ? 8 : 4, kBlocks = kWhole ? 4 : 2;  // of a multiprocessor
    static __device__ RawPack fetch(const ConstView& x, int64_t row, int64_t col, int count) {
        if constexpr (!kWhole) return fetch_pack(x, row, col, count);
        const auto* at = static_cast<const uint16_t*>(x.data) + row * x.ld + col;
        return {*reinterpret_cast<const uint4*>(at), {}};
    }
};

template <bool kWhole>
__global__ void __launch_bounds__(kStripThreads, StripBatch<kWhole>::kBlocks)
    strip_kernel(ConstView x, int64_t packs, int64_t rows, float* partial) {
    using Batch = StripBatch<kWhole>;
    __shared__ float room[kStripDown][kStripPacks * kPack];
    wait_for_last();
    let_next_start();
    const int across = static_cast<int>(threadIdx.x) % kStripPacks;
    const int down = static_cast<int>(threadIdx.x) / kStripPacks;
    const int64_t begin = int64_t{blockIdx.y} * packs * kPack, col = begin + across * kPack;
    const int count = across < packs ? pack_count(x.cols, col) : 0;
    const int64_t first = int64_t{blockIdx.x} * rows;
    const int64_t end = count > 0 ? min(first + rows, x.rows) : 0;
    Pack total{};
    for (int64_t row = first + down; row < end; row += Batch::kRows * kStripDown) {
        RawPack raw[Batch::kRows];
#pragma unroll
        for (int k = 0; k < Batch::kRows; ++k) {
            const int64_t at = row + k * kStripDown;
            raw[k] = at < end ? Batch::fetch(x, at, col, count) : RawPack{};
        }
        Pack sum{};
#pragma unroll
        for (int k = 0; k < Batch::kRows; ++k) {
            const Pack one = widen_pack(raw[k], kWhole ? DType::bf16 : x.type, count);
#pragma unroll
            for (int e = 0; e < kPack; ++e) sum.at[e] += one.at[e];
        }
#pragma unroll
        for (int e = 0; e < kPack; ++e) total.at[e] += sum.at[e];
    }
    total.count = kPack;
    put_pack(total, &room[down][across * kPack], DType::f32);
    __syncthreads();
    for (int64_t c = threadIdx.x; c < packs * kPack && begin + c < x.cols; c += kStripThreads) {
        float sum = 0;
        for (int part = 0; part < kStripDown; ++part) sum += room[part][c];
        partial[int64_t{blockIdx.x} * x.cols + begin + c] = sum;
    }
}

// All blocks are at work from the start, each with a batch of rows or more.
template <bool kWhole>
void add_strips(ConstView x, float* partial, Accumulator sums, cudaStream_t stream) {
    using Batch = StripBatch<kWhole>;
    constexpr int64_t kBlocks = int64_t{kMultiprocessors} * Batch::kBlocks;
    constexpr int64_t kLeast = int64_t{Batch::kRows} * kStripDown;
    static_assert(kLeast >= kNormRows, "scratch has room for a partial sum of kNormRows");
    const int64_t all = ceil_div(x.cols, kPack), strips = ceil_div(all, kStripPacks);
    const int64_t wanted = std::clamp<int64_t>(kBlocks / strips, 1, ceil_div(x.rows, kLeast));
    const int64_t rows = ceil_div(x.rows, wanted);
    const dim3 blocks(blocks_for(x.rows, rows), static_cast<unsigned>(strips));
    start(strip_kernel<kWhole>, blocks, kStripThreads, 0, stream, x, ceil_div(all, strips), rows,
          partial);
    add_partials(partial, blocks.x, x.cols, sums, stream);
}

void add_rows(ConstView x, float* partial, Accumulator sums, cudaStream_t stream) {
    lies_whole(x) && x.cols % kPack == 0 ? add_strips<true>(x, partial, sums, stream)
                                         : add_strips<false>(x, partial, sums, stream);
}

// ---------------------------------------------------------------- launching

// Whether one kernel does both: fewer blocks would leave multiprocessors without work. Never by
// what is asked for: the order of a sum follows from the shape.
bool sums_at_once(int64_t n, unsigned blocks) {
    constexpr unsigned kBlocksLeast = 256;
    return n <= kMostHeld && blocks >= kBlocksLeast;
}

template <class Norm>
void run_backward(const Norm& norm, Backward a, Accumulator weight_gradient,
                  Accumulator bias_gradient, cudaStream_t stream) {
    const int64_t n = a.weight.cols;
    const NormTerm<Norm> term{norm, a.dy, a.x, a.runs};
    const Lie lie = lie_of(n, any_wide(a.dy, a.x, a.addend), a.dy, a.x, a.addend, a.weight, a.dx);
    with_plan(n, lie, [&](auto plan) {
        using P = decltype(plan);
        using S = Summing<P::kRow, P::kHeld, P::kLie>;
        const bool asked = weight_gradient.asked() || bias_gradient.asked();
        if (asked && sums_at_once(n, blocks_for(a.runs.count, S::kRows))) {
            constexpr int64_t kGroupsAtOnce =
                int64_t{kMultiprocessors} * resident(P::kHeld, P::kLie) / P::kRow;
            a.rows_of_group =
                std::max<int64_t>(S::kRowsOfGroup, ceil_div(int64_t{a.runs.count}, kGroupsAtOnce));
            const unsigned blocks = blocks_for(a.runs.count, S::kGroups * a.rows_of_group);
            if (bias_gradient.asked()) a.bias_partial = a.partial + int64_t{blocks} * n;
            const auto kernel = sums_kernel<Norm, P>();
            constexpr int64_t kRoom = S::template room<Norm>();
            if constexpr (kRoom > 47 * kKiB) {
                cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                     static_cast<int>(kRoom));
            }
            start(kernel, blocks, P::kThreads, kRoom, stream, norm, a);
            if (weight_gradient.asked())
                add_partials(a.partial, blocks, n, weight_gradient, stream);
            if (bias_gradient.asked())
                add_partials(a.bias_partial, blocks, n, bias_gradient, stream);
            return;
        }
        if (bias_gradient.asked()) add_rows(a.dy, a.partial, bias_gradient, stream);
        if (weight_gradient.asked())
            add_sums(term, a.runs.count, n, a.partial, weight_gradient, stream);
        if (a.dx.data != nullptr) {
            start(backward_kernel<Norm, P::kRow, P::kHeld, P::kLie>, P::blocks(a.runs.count),
                  P::kThreads, 0, stream, norm, a);
        }
    });
}

Backward backward_of(ConstView dy, ConstView x, ConstView weight, ConstView addend, View dx,
                     float* partial) {
    return {dy,
            x,
            weight,
            addend,
            dx,
            runs_of(x, weight.cols),
            1.0 / static_cast<double>(weight.cols),
            partial};
}

}  // namespace

void norm_backward(ConstView dy, ConstView x, ConstView weight, const float* rstd, ConstView addend,
                   View dx, Accumulator weight_gradient, float* partial, cudaStream_t stream) {
    if (x.rows == 0) return add_nothing(weight.cols, weight_gradient, stream);
    run_backward(Rms{rstd}, backward_of(dy, x, weight, addend, dx, partial), weight_gradient,
                 nullptr, stream);
    check_launch("norm backward");
}

bool norm_rope_backward(View d, ConstView x, ConstView weight, const float* rstd,
                        Accumulator weight_gradient, const Rope& rope, const float* angles,
                        float* partial, cudaStream_t stream) {
    if (x.rows == 0) return add_nothing(weight.cols, weight_gradient, stream), true;
    if (!rotates_heads(angles, weight.cols) || !lies_whole(d) || !lies_whole(x) ||
        !lies_whole(weight))
        return false;
    Backward a = backward_of(d, x, weight, {}, d, partial);
    a.rotation = rotation_of(rope, angles);
    // The sums of few rows are a kernel apart, which turns nothing.
    const unsigned blocks = blocks_for(a.runs.count, Summing<8, 2, Lie::whole>::kRows);
    if (weight_gradient.asked() && !sums_at_once(weight.cols, blocks)) return false;
    run_backward(Rms{rstd}, a, weight_gradient, nullptr, stream);
    check_launch("norm and rope backward");
    return true;
}

void layer_norm_backward(ConstView dy, ConstView x, ConstView weight, const float* stats,
                         ConstView addend, View dx, Accumulator weight_gradient,
                         Accumulator bias_gradient, float* partial, cudaStream_t stream) {
    if (x.rows == 0) {
        add_nothing(weight.cols, weight_gradient, stream);
        return add_nothing(weight.cols, bias_gradient, stream);
    }
    run_backward(Layered{stats, x.rows}, backward_of(dy, x, weight, addend, dx, partial),
                 weight_gradient, bias_gradient, stream);
    check_launch("layer norm backward");
}

void sum_rows(ConstView x, Accumulator sums, float* partial, cudaStream_t stream) {
    if (x.cols == 0) return;
    if (x.rows == 0) return add_nothing(x.cols, sums, stream);
    add_rows(x, partial, sums, stream);
    check_launch("sum of rows");
}

}  // namespace ferry::ops::cuda
