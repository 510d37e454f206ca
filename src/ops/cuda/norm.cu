// RMSNorm and LayerNorm. A row of RMSNorm is a run of the weight's length, such as a head. A row
// belongs to a group of threads, is read once and stays in registers between its sums and its
// result. Sums over rows are made in two passes of fixed order.
#include <cuda_pipeline.h>

#include <algorithm>

#include "kernels.h"
#include "launch.h"
#include "pack.h"

namespace ferry::ops::cuda {
namespace {

// How the elements of rows lie. `whole`: all bf16, packs at multiples of 16 bytes, rows that
// threads hold: nothing is asked for each pack, so that loads and sums of several are under way
// together. The other two ask, of 16-bit elements and of any. All three add in one order.
enum class Lie { any, halves, whole };

// Threads of a block whose rows have `row` threads each: small blocks come and go evenly.
constexpr int block_of(int row) { return row < 128 ? 128 : row; }
constexpr int kMostThreads = 256;
// Of a row, that threads hold between its sums and its result.
constexpr int64_t kMostHeld = int64_t{4} * kMostThreads * kPack;

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
Runs runs_of(const ConstView& x, int64_t n) {
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

// Of 16 bytes, that a thread's packs take.
constexpr int places_of(int held, Lie lie) { return lie == Lie::any ? 2 * held : held; }

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

template <int kRow, int kHeld, Lie kLie>
__global__ void __launch_bounds__(block_of(kRow))
    forward_kernel(ConstView x, ConstView weight, double eps, View y, float* rstd, Runs runs) {
    const int64_t i = group_index<kRow>(), n = i < runs.count ? weight.cols : 0;
    const Run run = runs(i);
    HeldRow<kRow, kHeld, kLie> in;
    in.fetch(x, run, n);
    float squares = 0;
    each_held<kRow, kHeld, kLie>(n, [&](int k, int64_t col, int count) {
        const Pack pack = in.at(x, k, col, count);
#pragma unroll
        for (int e = 0; e < kPack; ++e) squares += pack.at[e] * pack.at[e];
    });
    const double mean =
        row_sum<kRow>(static_cast<double>(squares)) / static_cast<double>(weight.cols);
    const auto r = static_cast<float>(1 / sqrt(mean + eps));
    if (threadIdx.x % kRow == 0 && n > 0) rstd[i] = r;
    each_held<kRow, kHeld, kLie>(n, [&](int k, int64_t col, int count) {
        Pack pack = in.at(x, k, col, count);
        const Pack w = load_as<kLie>(weight, 0, col, count);
#pragma unroll
        for (int e = 0; e < kPack; ++e) pack.at[e] = pack.at[e] * r * w.at[e];
        store_as<kLie>(pack, y, run.row, run.col + col);
    });
}

template <int kRow, int kHeld, Lie kLie>
__global__ void __launch_bounds__(block_of(kRow))
    layer_forward_kernel(ConstView x, ConstView weight, ConstView bias, double eps, double share,
                         View y, float* stats) {
    const int64_t row = group_index<kRow>(), n = row < x.rows ? x.cols : 0;
    HeldRow<kRow, kHeld, kLie> in;
    in.fetch(x, {row, 0}, n);
    float sum = 0, squares = 0;
    each_held<kRow, kHeld, kLie>(n, [&](int k, int64_t col, int count) {
        const Pack pack = in.at(x, k, col, count);
#pragma unroll
        for (int e = 0; e < kPack; ++e) sum += pack.at[e];
    });
    const auto mean = static_cast<float>(row_sum<kRow>(static_cast<double>(sum)) * share);
    each_held<kRow, kHeld, kLie>(n, [&](int k, int64_t col, int count) {
        const Pack pack = in.at(x, k, col, count);
#pragma unroll
        for (int e = 0; e < kPack; ++e) {
            if (e < count) squares += (pack.at[e] - mean) * (pack.at[e] - mean);
        }
    });
    const double variance = row_sum<kRow>(static_cast<double>(squares)) * share;
    const auto r = static_cast<float>(1 / sqrt(variance + eps));
    if (threadIdx.x % kRow == 0 && n > 0) {
        stats[row] = mean;
        stats[x.rows + row] = r;
    }
    each_held<kRow, kHeld, kLie>(n, [&](int k, int64_t col, int count) {
        Pack pack = in.at(x, k, col, count);
        const Pack w = load_as<kLie>(weight, 0, col, count), b = load_as<kLie>(bias, 0, col, count);
#pragma unroll
        for (int e = 0; e < kPack; ++e) pack.at[e] = (pack.at[e] - mean) * r * w.at[e] + b.at[e];
        store_as<kLie>(pack, y, row, col);
    });
}

// ---------------------------------------------------------------- backward

// What the backward pass of a norm sums over a row, and what it makes of the sums.
struct Row {
    float mean, r;
};
struct Rms {
    static constexpr int kSums = 1;
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
    float* partial;  // of the weight's gradient
};

// What a row needs of memory.
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
    in.fetch(norm, a, i, n);
    backward_row(a, in, n, [](int, const Pack&, const Pack&) {});
}

// How the rows of a block that sums the weight's gradient lie: each group has some, one after the
// other, and the block's sum over them is one partial sum.
template <int kRow, int kHeld, Lie kLie>
struct Summing {
    static constexpr int kGroups = block_of(kRow) / kRow;
    static constexpr int kRowsOfGroup = kGroups == 1 || kRow < 32 ? 16 : 8;
    static constexpr int kRows = kGroups * kRowsOfGroup;
    static_assert(kRows >= kNormRows, "scratch has room for a partial sum of kNormRows");
    // The next row is under way in shared memory while one is worked on in registers.
    static constexpr int kPlaces = 3 * places_of(kHeld, kLie);
    static constexpr bool kAhead = kPlaces <= 12;
    static constexpr int64_t kRoom =
        std::max<int64_t>(kAhead ? block_of(kRow) * kPlaces * 16 : 0,
                          kGroups > 1 ? block_of(kRow) * kHeld * kPack * 4 : 0);
};

// Threads of a multiprocessor that find registers for what they hold: the more of them, the more
// memory is under way. 512 for all but the widest rows, where much would lie in memory instead.
constexpr int resident(int held, Lie lie) { return held == 4 && lie == Lie::any ? 256 : 512; }

// The same and, of the same reads, the sums of the weight's gradient. Columns: all held.
template <class Norm, int kRow, int kHeld, Lie kLie>
__global__ void __launch_bounds__(block_of(kRow), resident(kHeld, kLie) / block_of(kRow))
    backward_sums_kernel(Norm norm, Backward a) {
    using S = Summing<kRow, kHeld, kLie>;
    using In = Inputs<Norm, kRow, kHeld, kLie>;
    extern __shared__ uint4 room[];
    const int64_t first = group_index<kRow>() * S::kRowsOfGroup, cols = a.weight.cols;
    const int64_t end = min(first + S::kRowsOfGroup, int64_t{a.runs.count});
    const auto columns = [&](int64_t i) { return i < end ? cols : 0; };
    Pack sums[kHeld] = {};
    In in;
    in.fetch(norm, a, first, columns(first));
    for (int64_t i = first; i < first + S::kRowsOfGroup; ++i) {  // all threads of a warp together
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
        });
        if constexpr (S::kAhead) {
            __pipeline_wait_prior(0);
            if (next > 0) in.take(a, i + 1, of_next, room);
        } else {
            in.fetch(norm, a, i + 1, next);
        }
    }
    float* partial = a.partial + int64_t{blockIdx.x} * cols;
    if constexpr (S::kGroups == 1) {
        each_held<kRow, kHeld, kLie>(cols, [&](int k, int64_t col, int count) {
            if (k < 0) return;
            sums[k].count = count;
            put_pack(sums[k], partial + col, DType::f32);
        });
    } else {
        constexpr int kWidth = kRow * kHeld * kPack;
        auto* of_groups = reinterpret_cast<float*>(room);
        __syncthreads();  // all have taken what was under way
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

// ---------------------------------------------------------------- sums over rows

// What the gradients of a pack of columns sum over rows.
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
struct PlainTerm {
    ConstView x;
    static constexpr int kTogether = 4;
    using Raw = RawPack;
    __device__ Raw fetch(int64_t i, int64_t col, int count) const {
        return fetch_pack(x, i, col, count);
    }
    __device__ void add(const Raw& raw, int count, Pack& sum) const {
        const Pack one = widen_pack(raw, x.type, count);
#pragma unroll
        for (int e = 0; e < kPack; ++e) sum.at[e] += one.at[e];
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
    gradient_kernel(const float* partial, int64_t blocks, int64_t cols, float* gradient) {
    __shared__ double sums[kParts][kColumns];
    const int64_t col = int64_t{blockIdx.x} * kColumns + threadIdx.x;
    const int64_t run = (blocks + kParts - 1) / kParts, first = threadIdx.y * run;
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
    gradient[col] = static_cast<float>(static_cast<double>(gradient[col]) + total);
}

void add_partials(const float* partial, int64_t count, int64_t cols, float* sums,
                  cudaStream_t stream) {
    gradient_kernel<<<blocks_for(cols, kColumns), dim3(kColumns, kParts), 0, stream>>>(
        partial, count, cols, sums);
}

template <class Term>
void add_sums(const Term& term, int64_t rows, int64_t cols, float* partial, float* sums,
              cudaStream_t stream) {
    const dim3 blocks(blocks_for(rows, kSumRows), blocks_for(cols, kAcross * kPack));
    partial_kernel<<<blocks, kAcross * kDown, 0, stream>>>(term, rows, cols, partial);
    add_partials(partial, blocks.x, cols, sums, stream);
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

// Of the tensors with a place; a result or a weight of other elements does not make rows wide.
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

template <class Norm>
void run_backward(const Norm& norm, const Backward& a, float* weight_gradient,
                  cudaStream_t stream) {
    const int64_t n = a.weight.cols;
    const NormTerm<Norm> term{norm, a.dy, a.x, a.runs};
    const Lie lie = lie_of(n, any_wide(a.dy, a.x, a.addend), a.dy, a.x, a.addend, a.weight, a.dx);
    with_plan(n, lie, [&](auto plan) {
        using P = decltype(plan);
        using S = Summing<P::kRow, P::kHeld, P::kLie>;
        // Fewer blocks would leave multiprocessors without work: then two kernels. Never by what is
        // asked for: the order of a sum follows from the shape.
        constexpr unsigned kBlocksLeast = 256;
        const unsigned blocks = blocks_for(a.runs.count, S::kRows);
        if (weight_gradient != nullptr && n <= kMostHeld && blocks >= kBlocksLeast) {
            const auto kernel = backward_sums_kernel<Norm, P::kRow, P::kHeld, P::kLie>;
            if constexpr (S::kRoom > 47 * kKiB) {
                cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                     static_cast<int>(S::kRoom));
            }
            kernel<<<blocks, P::kThreads, S::kRoom, stream>>>(norm, a);
            return add_partials(a.partial, blocks, n, weight_gradient, stream);
        }
        if (weight_gradient != nullptr)
            add_sums(term, a.runs.count, n, a.partial, weight_gradient, stream);
        if (a.dx.data != nullptr) {
            backward_kernel<Norm, P::kRow, P::kHeld, P::kLie>
                <<<P::blocks(a.runs.count), P::kThreads, 0, stream>>>(norm, a);
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

void norm_forward(ConstView x, ConstView weight, double eps, View y, float* rstd,
                  cudaStream_t stream) {
    if (x.rows == 0) return;
    const Runs runs = runs_of(x, weight.cols);
    const Lie lie = lie_of(weight.cols, any_wide(x), x, weight, y);
    with_plan(weight.cols, lie, [&](auto plan) {
        using P = decltype(plan);
        forward_kernel<P::kRow, P::kHeld, P::kLie>
            <<<P::blocks(runs.count), P::kThreads, 0, stream>>>(x, weight, eps, y, rstd, runs);
    });
    check_launch("norm forward");
}

void norm_backward(ConstView dy, ConstView x, ConstView weight, const float* rstd, ConstView addend,
                   View dx, float* weight_gradient, float* partial, cudaStream_t stream) {
    if (x.rows == 0) return;
    run_backward(Rms{rstd}, backward_of(dy, x, weight, addend, dx, partial), weight_gradient,
                 stream);
    check_launch("norm backward");
}

void layer_norm_forward(ConstView x, ConstView weight, ConstView bias, double eps, View y,
                        float* stats, cudaStream_t stream) {
    if (x.rows == 0) return;
    const Lie lie = lie_of(x.cols, any_wide(x), x, weight, bias, y);
    const double share = 1.0 / static_cast<double>(x.cols);
    with_plan(x.cols, lie, [&](auto plan) {
        using P = decltype(plan);
        layer_forward_kernel<P::kRow, P::kHeld, P::kLie>
            <<<P::blocks(x.rows), P::kThreads, 0, stream>>>(x, weight, bias, eps, share, y, stats);
    });
    check_launch("layer norm forward");
}

void layer_norm_backward(ConstView dy, ConstView x, ConstView weight, const float* stats,
                         ConstView addend, View dx, float* weight_gradient, float* partial,
                         cudaStream_t stream) {
    if (x.rows == 0) return;
    run_backward(Layered{stats, x.rows}, backward_of(dy, x, weight, addend, dx, partial),
                 weight_gradient, stream);
    check_launch("layer norm backward");
}

void sum_rows(ConstView x, float* sums, float* partial, cudaStream_t stream) {
    if (x.rows == 0 || x.cols == 0) return;
    add_sums(PlainTerm{x}, x.rows, x.cols, partial, sums, stream);
    check_launch("sum of rows");
}

}  // namespace ferry::ops::cuda
