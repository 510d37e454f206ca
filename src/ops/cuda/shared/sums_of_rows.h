// Sums over rows in two passes of fixed order: partial sums of blocks of rows, then those in order.
#pragma once

#include "early_start.h"
#include "kernels.h"
#include "pack.h"

namespace ferry::ops::cuda {

// Of the GPU that blocks are counted for. A constant, so that sums do not depend on the GPU.
constexpr int kMultiprocessors = 132;

// Adds `count` rows of partial sums, [count, cols], to the sums. Of two sums in one launch: those
// of `other` lie behind the first one's, as many.
void add_partials(const float* partial, int64_t count, int64_t cols, Accumulator sums,
                  cudaStream_t stream);
void add_partials(const float* partial, int64_t count, int64_t cols, Accumulator sums,
                  Accumulator other, cudaStream_t stream);
// The same of no rows.
inline void add_nothing(int64_t cols, Accumulator sums, cudaStream_t stream) {
    if (sums.asked() && sums.fresh) add_partials(nullptr, 0, cols, sums, stream);
}
// The sums of x's rows. partial: as norm_backward's.
void add_rows(ConstView x, float* partial, Accumulator sums, cudaStream_t stream);

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

template <class Term>
void add_sums(const Term& term, int64_t rows, int64_t cols, float* partial, Accumulator sums,
              cudaStream_t stream) {
    const dim3 blocks(blocks_for(rows, kSumRows), blocks_for(cols, kAcross * kPack));
    start(partial_kernel<Term>, blocks, kAcross * kDown, 0, stream, term, rows, cols, partial);
    add_partials(partial, blocks.x, cols, sums, stream);
}

}  // namespace ferry::ops::cuda
