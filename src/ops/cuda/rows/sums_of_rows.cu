// The gradient of a bias, and the second pass of every sum over rows.
#include "ops/cuda/shared/sums_of_rows.h"

#include <algorithm>

#include "ops/cuda/norms/norm_row.h"

namespace ferry::ops::cuda {

namespace {

// A sector's width of columns, for many blocks; each of kParts threads of a column adds a run of
// the partial sums in order, and the first adds the runs in order.
constexpr int kColumns = 8, kParts = 32;
__global__ void __launch_bounds__(kColumns* kParts)
    gradient_kernel(const float* partial, int64_t blocks, int64_t cols, Accumulator gradient,
                    Accumulator other) {
    __shared__ double sums[kParts][kColumns];
    wait_for_last();
    if (blockIdx.y == 1) {
        partial += blocks * cols;
        gradient = other;
    }
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

// A block has a strip of up to kStripPacks packs of columns, which lie next to each other, and a
// run of the rows. Each of kStripDown threads of a pack adds every kStripDown-th row, a batch at a
// time.
constexpr int kStripPacks = 64, kStripDown = 4, kStripThreads = kStripPacks * kStripDown;

// How rows are divided, and so the order of their sum, follows from type and columns alone: rows of
// bf16 in whole packs have larger batches wherever they lie.
enum class Strip {
    any,
    scattered,  // bf16, columns in whole packs, which may lie anywhere
    whole       // and all packs at multiples of 16 bytes
};
template <Strip kStrip>
struct StripBatch {
    static constexpr bool kPacked = kStrip != Strip::any;
    static constexpr int kRows = kPacked ? 8 : 4, kBlocks = kPacked ? 4 : 2;  // of a multiprocessor
    static __device__ DType type_of(const ConstView& x) { return kPacked ? DType::bf16 : x.type; }
    static __device__ RawPack fetch(const ConstView& x, int64_t row, int64_t col, int count) {
        if constexpr (kStrip == Strip::any) return fetch_pack(x, row, col, count);
        const auto* at = static_cast<const uint16_t*>(x.data) + row * x.ld + col;
        if constexpr (kStrip == Strip::scattered) return fetch_pack(at, DType::bf16, kPack);
        return {*reinterpret_cast<const uint4*>(at), {}};
    }
};

template <Strip kStrip>
__global__ void __launch_bounds__(kStripThreads, StripBatch<kStrip>::kBlocks)
    strip_kernel(ConstView x, int64_t packs, int64_t rows, float* partial) {
    using Batch = StripBatch<kStrip>;
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
            const Pack one = widen_pack(raw[k], Batch::type_of(x), count);
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
template <Strip kStrip>
void add_strips(ConstView x, float* partial, Accumulator sums, cudaStream_t stream) {
    using Batch = StripBatch<kStrip>;
    constexpr int64_t kBlocks = int64_t{kMultiprocessors} * Batch::kBlocks;
    constexpr int64_t kLeast = int64_t{Batch::kRows} * kStripDown;
    static_assert(kLeast >= kNormRows, "scratch has room for a partial sum of kNormRows");
    const int64_t all = ceil_div(x.cols, kPack), strips = ceil_div(all, kStripPacks);
    const int64_t wanted = std::clamp<int64_t>(kBlocks / strips, 1, ceil_div(x.rows, kLeast));
    const int64_t rows = ceil_div(x.rows, wanted);
    const dim3 blocks(blocks_for(x.rows, rows), static_cast<unsigned>(strips));
    start(strip_kernel<kStrip>, blocks, kStripThreads, 0, stream, x, ceil_div(all, strips), rows,
          partial);
    add_partials(partial, blocks.x, x.cols, sums, stream);
}

}  // namespace

void add_partials(const float* partial, int64_t count, int64_t cols, Accumulator sums,
                  cudaStream_t stream) {
    add_partials(partial, count, cols, sums, nullptr, stream);
}
void add_partials(const float* partial, int64_t count, int64_t cols, Accumulator sums,
                  Accumulator other, cudaStream_t stream) {
    const dim3 blocks(blocks_for(cols, kColumns), other.asked() ? 2 : 1);
    start(gradient_kernel, blocks, dim3(kColumns, kParts), 0, stream, partial, count, cols, sums,
          other);
}

void add_rows(ConstView x, float* partial, Accumulator sums, cudaStream_t stream) {
    if (x.type != DType::bf16 || x.cols % kPack != 0)
        return add_strips<Strip::any>(x, partial, sums, stream);
    lies_whole(x) ? add_strips<Strip::whole>(x, partial, sums, stream)
                  : add_strips<Strip::scattered>(x, partial, sums, stream);
}

void sum_rows(ConstView x, Accumulator sums, float* partial, cudaStream_t stream) {
    if (x.cols == 0) return;
    if (x.rows == 0) return add_nothing(x.cols, sums, stream);
    add_rows(x, partial, sums, stream);
    check_launch("sum of rows");
}

}  // namespace ferry::ops::cuda
