// Sums over rows, in two passes of fixed order: partial sums of some rows, then their sum in
// double.
#pragma once

#include "kernels.h"
#include "launch.h"
#include "pack.h"

namespace ferry::ops::cuda {

// What is summed is a term: `fetch` reads what a row has of a pack of columns, `add` adds it. The
// loads of kTogether rows are under way together.
struct PlainTerm {
    ConstView x;
    static constexpr int kTogether = 4;
    using Raw = RawPack;
    __device__ Raw fetch(int64_t i, int64_t col, int count) const {
        return fetch_pack(x, i, col, count);
    }
    __device__ void add(const Raw& raw, int64_t, int64_t, int count, Pack& sum) const {
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
            if (row + k * kDown < last) term.add(raw[k], row + k * kDown, col, count, sum);
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
static __global__ void __launch_bounds__(kColumns* kParts)
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

inline void add_partials(const float* partial, int64_t count, int64_t cols, float* sums,
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

}  // namespace ferry::ops::cuda
