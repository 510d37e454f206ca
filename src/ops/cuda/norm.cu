// RMSNorm and LayerNorm. A row of RMSNorm is a run of the weight's length, such as a head. A row
// belongs to a group of threads, is read once and stays in registers between its sums and its
// result. Sums over rows are made in two passes of fixed order.
#include <algorithm>

#include "kernels.h"
#include "launch.h"
#include "pack.h"

namespace ferry::ops::cuda {
namespace {

constexpr int kThreads = 256;

// The i-th run of n columns: where it begins.
struct Run {
    int64_t row, col;
};
__device__ Run run_of(const ConstView& v, int64_t i, int64_t n) {
    const int64_t runs = v.cols / n;
    return {i / runs, i % runs * n};
}

// The sum over the kRow threads of a row, in each of them: a fixed tree in a warp, then the warps
// in order. Threads without elements add zeros. Which plan a row has, and so the order of its sum,
// follows from its length and its elements' width alone (with_plan).
template <int kRow>
__device__ double row_sum(double value) {
    for (int half = min(kRow, 32) / 2; half > 0; half /= 2)
        value += __shfl_xor_sync(0xffffffffu, value, half);
    if constexpr (kRow <= 32) {
        return 0.0 + value;
    } else {
        __shared__ double sums[kThreads / 32];
        const int warp = static_cast<int>(threadIdx.x) / 32;
        __syncthreads();  // the room may still be read by the sum before
        if (threadIdx.x % 32 == 0) sums[warp] = value;
        __syncthreads();
        double total = 0;
        for (int w = 0; w < kRow / 32; ++w) total += sums[warp / (kRow / 32) * (kRow / 32) + w];
        return total;
    }
}

// How the columns of a row lie among the kRow threads of its group: packs of neighbours to
// neighbours. The first kHeld packs of a thread stay in registers; k is -1 behind them.
template <int kRow, int kHeld, class Body>
__device__ void each_held(int64_t n, Body body) {
    const int64_t lane = static_cast<int>(threadIdx.x) % kRow;
#pragma unroll
    for (int k = 0; k < kHeld; ++k) {
        const int64_t col = (lane + int64_t{k} * kRow) * kPack;
        if (col < n) body(k, col, pack_count(n, col));
    }
    for (int64_t col = (lane + int64_t{kHeld} * kRow) * kPack; col < n; col += kRow * kPack)
        body(-1, col, pack_count(n, col));
}

// Rows of 16-bit elements (not kWide) take half the registers, so that more of them are under way.
template <int kRow, int kHeld, bool kWide>
struct HeldRow {
    uint4 low[kHeld], high[kWide ? kHeld : 1];
    Run run;
    static __device__ DType type_of(const ConstView& v) {
        if constexpr (kWide) return v.type;
        return v.type == DType::f16 ? DType::f16 : DType::bf16;
    }
    __device__ void fetch(const ConstView& v, Run at, int64_t n) {
        run = at;
#pragma unroll
        for (int k = 0; k < kHeld; ++k) {
            const int64_t lane = static_cast<int>(threadIdx.x) % kRow;
            const int64_t col = (lane + int64_t{k} * kRow) * kPack;
            RawPack raw{};
            if (col < n) {
                const auto bytes = kWide ? size_of(v.type) : int64_t{2};
                raw = fetch_pack(
                    static_cast<const char*>(v.data) + (at.row * v.ld + at.col + col) * bytes,
                    type_of(v), pack_count(n, col));
            }
            low[k] = raw.low;
            if constexpr (kWide) high[k] = raw.high;
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
    return int64_t{blockIdx.x} * (kThreads / kRow) + static_cast<int>(threadIdx.x) / kRow;
}

template <int kRow, int kHeld, bool kWide>
__global__ void __launch_bounds__(kThreads)
    forward_kernel(ConstView x, ConstView weight, double eps, View y, float* rstd, int64_t runs) {
    const int64_t i = group_index<kRow>(), n = i < runs ? weight.cols : 0;
    const Run run = run_of(x, i, weight.cols);
    HeldRow<kRow, kHeld, kWide> in;
    in.fetch(x, run, n);
    float squares = 0;
    each_held<kRow, kHeld>(n, [&](int k, int64_t col, int count) {
        const Pack pack = in.at(x, k, col, count);
#pragma unroll
        for (int e = 0; e < kPack; ++e) squares += pack.at[e] * pack.at[e];
    });
    const double mean =
        row_sum<kRow>(static_cast<double>(squares)) / static_cast<double>(weight.cols);
    const auto r = static_cast<float>(1 / sqrt(mean + eps));
    if (threadIdx.x % kRow == 0 && n > 0) rstd[i] = r;
    each_held<kRow, kHeld>(n, [&](int k, int64_t col, int count) {
        Pack pack = in.at(x, k, col, count);
        const Pack w = load_pack(weight, 0, col, count);
#pragma unroll
        for (int e = 0; e < kPack; ++e) pack.at[e] = pack.at[e] * r * w.at[e];
        store_pack(pack, y, run.row, run.col + col);
    });
}

template <int kRow, int kHeld, bool kWide>
__global__ void __launch_bounds__(kThreads)
    layer_forward_kernel(ConstView x, ConstView weight, ConstView bias, double eps, View y,
                         float* stats) {
    const int64_t row = group_index<kRow>(), n = row < x.rows ? x.cols : 0;
    const auto cols = static_cast<double>(x.cols);
    HeldRow<kRow, kHeld, kWide> in;
    in.fetch(x, {row, 0}, n);
    float sum = 0, squares = 0;
    each_held<kRow, kHeld>(n, [&](int k, int64_t col, int count) {
        const Pack pack = in.at(x, k, col, count);
#pragma unroll
        for (int e = 0; e < kPack; ++e) sum += pack.at[e];
    });
    const auto mean = static_cast<float>(row_sum<kRow>(static_cast<double>(sum)) / cols);
    each_held<kRow, kHeld>(n, [&](int k, int64_t col, int count) {
        const Pack pack = in.at(x, k, col, count);
#pragma unroll
        for (int e = 0; e < kPack; ++e) {
            if (e < count) squares += (pack.at[e] - mean) * (pack.at[e] - mean);
        }
    });
    const double variance = row_sum<kRow>(static_cast<double>(squares)) / cols;
    const auto r = static_cast<float>(1 / sqrt(variance + eps));
    if (threadIdx.x % kRow == 0 && n > 0) {
        stats[row] = mean;
        stats[x.rows + row] = r;
    }
    each_held<kRow, kHeld>(n, [&](int k, int64_t col, int count) {
        Pack pack = in.at(x, k, col, count);
        const Pack w = load_pack(weight, 0, col, count), b = load_pack(bias, 0, col, count);
#pragma unroll
        for (int e = 0; e < kPack; ++e) pack.at[e] = (pack.at[e] - mean) * r * w.at[e] + b.at[e];
        store_pack(pack, y, row, col);
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
    __device__ static void divide(const double (&totals)[kSums], Row row, double n,
                                  float (&levels)[kSums]) {
        const double wide = row.r;
        levels[0] = static_cast<float>(wide * wide * wide * totals[0] / n);
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
    __device__ static void divide(const double (&totals)[kSums], Row, double n,
                                  float (&levels)[kSums]) {
        for (int k = 0; k < kSums; ++k) levels[k] = static_cast<float>(totals[k] / n);
    }
    __device__ static float own(float w, float d, float x, Row row, const float (&levels)[kSums]) {
        return row.r * (w * d - levels[0] - normed(x, row) * levels[1]);
    }
    __device__ static float normed(float x, Row row) { return (x - row.mean) * row.r; }
};

struct Backward {
    ConstView dy, x, weight, addend;
    View dx;
    int64_t runs;
    float* partial;  // of the weight's gradient
};

// What a row needs of memory: under way while the row before is worked on.
template <class Norm, int kRow, int kHeld, bool kWide>
struct Inputs {
    HeldRow<kRow, kHeld, kWide> d, x, before;
    Row row{};
    __device__ void fetch(const Norm& norm, const Backward& a, int64_t i, int64_t n) {
        if (n == 0) return;
        row = norm.row(i);
        const Run run = run_of(a.x, i, a.weight.cols);
        d.fetch(a.dy, run, n);
        x.fetch(a.x, run, n);
        if (a.addend.data != nullptr) before.fetch(a.addend, run, n);
    }
};

template <class Norm, int kRow, int kHeld, bool kWide>
__device__ void backward_row(const Backward& a, const Inputs<Norm, kRow, kHeld, kWide>& in,
                             int64_t n) {
    float sums[Norm::kSums] = {}, levels[Norm::kSums];
    double totals[Norm::kSums];
    each_held<kRow, kHeld>(n, [&](int k, int64_t col, int count) {
        const Pack w = load_pack(a.weight, 0, col, count), d = in.d.at(a.dy, k, col, count);
        const Pack x = in.x.at(a.x, k, col, count);
#pragma unroll
        for (int e = 0; e < kPack; ++e) Norm::add(w.at[e], d.at[e], x.at[e], in.row, sums);
    });
    for (int k = 0; k < Norm::kSums; ++k) totals[k] = row_sum<kRow>(static_cast<double>(sums[k]));
    Norm::divide(totals, in.row, static_cast<double>(a.weight.cols), levels);
    each_held<kRow, kHeld>(n, [&](int k, int64_t col, int count) {
        const Pack w = load_pack(a.weight, 0, col, count), d = in.d.at(a.dy, k, col, count);
        Pack out = in.x.at(a.x, k, col, count), before{};
        if (a.addend.data != nullptr) before = in.before.at(a.addend, k, col, count);
#pragma unroll
        for (int e = 0; e < kPack; ++e) {
            const float own = Norm::own(w.at[e], d.at[e], out.at[e], in.row, levels);
            out.at[e] = before.at[e] + own;
        }
        store_pack(out, a.dx, in.x.run.row, in.x.run.col + col);
    });
}

template <class Norm, int kRow, int kHeld, bool kWide>
__global__ void __launch_bounds__(kThreads) backward_kernel(Norm norm, Backward a) {
    const int64_t i = group_index<kRow>(), n = i < a.runs ? a.weight.cols : 0;
    Inputs<Norm, kRow, kHeld, kWide> in;
    in.fetch(norm, a, i, n);
    backward_row<Norm, kRow, kHeld, kWide>(a, in, n);
}

// The same and, of the same reads, the sums of the weight's gradient: a group has kNormRows rows,
// one after the other. Columns: all held.
template <class Norm, int kRow, int kHeld, bool kWide>
__global__ void __launch_bounds__(kThreads) backward_sums_kernel(Norm norm, Backward a) {
    const int64_t group = group_index<kRow>(), first = group * kNormRows;
    const auto columns = [&](int64_t i) {
        return i < min(first + kNormRows, a.runs) ? a.weight.cols : 0;
    };
    Pack sums[kHeld] = {};
    Inputs<Norm, kRow, kHeld, kWide> in;
    in.fetch(norm, a, first, columns(first));
    for (int64_t i = first; i < first + kNormRows; ++i) {  // all threads of the block together
        const int64_t n = columns(i);
        [[maybe_unused]] Inputs<Norm, kRow, kHeld, kWide> next;
        if constexpr (kHeld == 1) {
            if (i + 1 < first + kNormRows) next.fetch(norm, a, i + 1, columns(i + 1));
        }
#pragma unroll
        for (int k = 0; k < kHeld; ++k) {
            if (n == 0) break;
            const Pack d = in.d.held(a.dy, k, kPack);
            const Pack x = in.x.held(a.x, k, kPack);
#pragma unroll
            for (int e = 0; e < kPack; ++e)
                sums[k].at[e] = fmaf(Norm::normed(x.at[e], in.row), d.at[e], sums[k].at[e]);
        }
        backward_row<Norm, kRow, kHeld, kWide>(a, in, n);
        if constexpr (kHeld == 1) {
            in = next;
        } else if (i + 1 < first + kNormRows) {
            in.fetch(norm, a, i + 1, columns(i + 1));
        }
    }
    if (first >= a.runs) return;
    each_held<kRow, kHeld>(a.weight.cols, [&](int k, int64_t col, int count) {
        if (k < 0) return;
        sums[k].count = count;
        put_pack(sums[k], a.partial + group * a.weight.cols + col, DType::f32);
    });
}

// ---------------------------------------------------------------- sums over rows

// What the gradients of a pack of columns sum over rows.
template <class Norm>
struct NormTerm {
    Norm norm;
    ConstView dy, x;
    int64_t n;
    __device__ void add(int64_t i, int64_t col, int count, Pack& sum) const {
        const Run run = run_of(x, i, n);
        const RawPack raw_x = fetch_pack(x, run.row, run.col + col, count);
        const RawPack raw_d = fetch_pack(dy, run.row, run.col + col, count);
        const Row row = norm.row(i);
        const Pack in = widen_pack(raw_x, x.type, count), d = widen_pack(raw_d, dy.type, count);
#pragma unroll
        for (int e = 0; e < kPack; ++e)
            sum.at[e] = fmaf(Norm::normed(in.at[e], row), d.at[e], sum.at[e]);
    }
};
struct PlainTerm {
    ConstView x;
    __device__ void add(int64_t i, int64_t col, int count, Pack& sum) const {
        const Pack one = load_pack(x, i, col, count);
#pragma unroll
        for (int e = 0; e < kPack; ++e) sum.at[e] += one.at[e];
    }
};

// A thread a pack of columns, over kNormRows rows.
template <class Term>
__global__ void partial_kernel(Term term, int64_t rows, int64_t cols, float* partial) {
    const int64_t col = (int64_t{blockIdx.y} * blockDim.x + threadIdx.x) * kPack;
    if (col >= cols) return;
    const int count = pack_count(cols, col);
    const int64_t first = int64_t{blockIdx.x} * kNormRows, last = min(first + kNormRows, rows);
    Pack sum{};
    sum.count = count;
#pragma unroll 4
    for (int64_t row = first; row < last; ++row) term.add(row, col, count, sum);
    put_pack(sum, partial + int64_t{blockIdx.x} * cols + col, DType::f32);
}

// A warp's width of columns; each of kParts threads of a column adds a run of the partial sums in
// order, and the first adds the runs in order.
constexpr int kColumns = 32, kParts = 16;
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

void add_partials(const float* partial, int64_t rows, int64_t cols, float* sums,
                  cudaStream_t stream) {
    gradient_kernel<<<blocks_for(cols, kColumns), dim3(kColumns, kParts), 0, stream>>>(
        partial, ceil_div(rows, kNormRows), cols, sums);
}

template <class Term>
void add_sums(const Term& term, int64_t rows, int64_t cols, float* partial, float* sums,
              cudaStream_t stream) {
    // Narrow blocks, so that many of them are at work.
    const auto threads =
        static_cast<unsigned>(std::min<int64_t>(128, round_up(ceil_div(cols, kPack), 32)));
    const dim3 blocks(blocks_for(rows, kNormRows), blocks_for(cols, threads * kPack));
    partial_kernel<<<blocks, threads, 0, stream>>>(term, rows, cols, partial);
    add_partials(partial, rows, cols, sums, stream);
}

// ---------------------------------------------------------------- launching

template <int kRowThreads, int kHeldPacks, bool kWideRows>
struct Plan {
    static constexpr int kRow = kRowThreads, kHeld = kHeldPacks;
    static constexpr bool kWide = kWideRows;
    static unsigned blocks(int64_t groups) { return blocks_for(groups, kThreads / kRow); }
};
constexpr int64_t kMostHeld = int64_t{4} * kThreads * kPack;  // columns

// call(Plan<...>()): few threads for the rows of heads, half a block for narrow rows. What a thread
// holds and adds follows from the length of a row and the width of its elements.
template <class Call>
void with_plan(int64_t n, bool wide, const Call& call) {
    const int64_t packs = ceil_div(n, kPack);
    if (wide) {
        if (packs <= 16) return call(Plan<16, 1, true>());
        if (packs <= 128) return call(Plan<128, 1, true>());
        if (packs <= 256) return call(Plan<256, 1, true>());
        if (packs <= 512) return call(Plan<256, 2, true>());
        return call(Plan<256, 4, true>());
    }
    if (packs <= 16) return call(Plan<16, 1, false>());
    if (packs <= 128) return call(Plan<128, 1, false>());
    if (packs <= 256) return call(Plan<128, 2, false>());
    if (packs <= 384) return call(Plan<128, 3, false>());
    if (packs <= 512) return call(Plan<128, 4, false>());
    return call(Plan<256, 4, false>());
}
template <class... Views>
bool any_wide(const Views&... views) {
    return ((views.data != nullptr && views.type == DType::f32) || ...);
}

template <class Norm>
void run_backward(const Norm& norm, const Backward& a, float* weight_gradient,
                  cudaStream_t stream) {
    const int64_t n = a.weight.cols, groups = ceil_div(a.runs, kNormRows);
    const NormTerm<Norm> term{norm, a.dy, a.x, n};
    with_plan(n, any_wide(a.dy, a.x, a.addend), [&](auto plan) {
        using P = decltype(plan);
        // Fewer blocks would leave multiprocessors without work: then two kernels, of the same
        // sums.
        constexpr unsigned kBlocksLeast = 128;
        const bool fused = weight_gradient != nullptr && a.dx.data != nullptr && n <= kMostHeld &&
                           P::blocks(groups) >= kBlocksLeast;
        if (fused) {
            backward_sums_kernel<Norm, P::kRow, P::kHeld, P::kWide>
                <<<P::blocks(groups), kThreads, 0, stream>>>(norm, a);
            return add_partials(a.partial, a.runs, n, weight_gradient, stream);
        }
        if (weight_gradient != nullptr)
            add_sums(term, a.runs, n, a.partial, weight_gradient, stream);
        if (a.dx.data != nullptr) {
            backward_kernel<Norm, P::kRow, P::kHeld, P::kWide>
                <<<P::blocks(a.runs), kThreads, 0, stream>>>(norm, a);
        }
    });
}

}  // namespace

void norm_forward(ConstView x, ConstView weight, double eps, View y, float* rstd,
                  cudaStream_t stream) {
    if (x.rows == 0) return;
    const int64_t runs = x.rows * (x.cols / weight.cols);
    with_plan(weight.cols, any_wide(x), [&](auto plan) {
        using P = decltype(plan);
        forward_kernel<P::kRow, P::kHeld, P::kWide>
            <<<P::blocks(runs), kThreads, 0, stream>>>(x, weight, eps, y, rstd, runs);
    });
    check_launch("norm forward");
}

void norm_backward(ConstView dy, ConstView x, ConstView weight, const float* rstd, ConstView addend,
                   View dx, float* weight_gradient, float* partial, cudaStream_t stream) {
    if (x.rows == 0) return;
    const int64_t runs = x.rows * (x.cols / weight.cols);
    run_backward(Rms{rstd}, {dy, x, weight, addend, dx, runs, partial}, weight_gradient, stream);
    check_launch("norm backward");
}

void layer_norm_forward(ConstView x, ConstView weight, ConstView bias, double eps, View y,
                        float* stats, cudaStream_t stream) {
    if (x.rows == 0) return;
    with_plan(x.cols, any_wide(x), [&](auto plan) {
        using P = decltype(plan);
        layer_forward_kernel<P::kRow, P::kHeld, P::kWide>
            <<<P::blocks(x.rows), kThreads, 0, stream>>>(x, weight, bias, eps, y, stats);
    });
    check_launch("layer norm forward");
}

void layer_norm_backward(ConstView dy, ConstView x, ConstView weight, const float* stats,
                         ConstView addend, View dx, float* weight_gradient, float* partial,
                         cudaStream_t stream) {
    if (x.rows == 0) return;
    run_backward(Layered{stats, x.rows}, {dy, x, weight, addend, dx, x.rows, partial},
                 weight_gradient, stream);
    check_launch("layer norm backward");
}

void sum_rows(ConstView x, float* sums, float* partial, cudaStream_t stream) {
    if (x.rows == 0 || x.cols == 0) return;
    add_sums(PlainTerm{x}, x.rows, x.cols, partial, sums, stream);
    check_launch("sum of rows");
}

}  // namespace ferry::ops::cuda
