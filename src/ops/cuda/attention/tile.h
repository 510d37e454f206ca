// Tiles of attention in shared memory, fp32, [rows, kD] with kD the head's elements rounded up to
// 32; a thread of 16 x 16 works on some rows and on columns 16 apart.
#pragma once

#include "ops/cuda/shared/element.h"

namespace ferry::ops::cuda {

constexpr int kTileThreads = 256;
// Elements from row to row: reads of 16 rows at once meet different banks.
template <int kD>
constexpr int kTileRow = kD + 4;

__device__ inline bool sees(const Attention& shape, int64_t query, int64_t key) {
    return key <= query && key >= shape.first_key(query);
}

// put(row, col, inside) for every kTogether-th element of a tile's rows, shared out over the block.
// Outside: beyond the `rows` that there are, or beyond the head.
template <int kRows, int kD, int kTogether = 1, class Put>
__device__ void each_of_tile(int64_t rows, int64_t head_dim, const Put& put) {
    constexpr int kOfRow = kD / kTogether;
    for (int i = static_cast<int>(threadIdx.x); i < kRows * kOfRow; i += kTileThreads) {
        const int row = i / kOfRow, col = i % kOfRow * kTogether;
        put(row, col, row < rows && col < head_dim);
    }
}

// Rows [first, first + kRows) of one head's columns; zeros beyond `end` and beyond the head.
template <int kRows, int kD>
__device__ void load_tile(float* tile, const ConstView& from, int64_t base, int64_t first,
                          int64_t end, int64_t head, int64_t head_dim) {
    each_of_tile<kRows, kD>(end - first, head_dim, [&](int row, int col, bool inside) {
        tile[row * kTileRow<kD> + col] =
            inside ? load(from, base + first + row, head * head_dim + col) : 0.0f;
    });
}

__device__ inline float dot(const float4& a, const float4& b, float sum) {
    return fmaf(a.w, b.w, fmaf(a.z, b.z, fmaf(a.y, b.y, fmaf(a.x, b.x, sum))));
}

// sums[i][j] = a[row + i] . b[col + 16 j], over kD.
template <int kM, int kN, int kD>
__device__ void inner_products(const float* a, int row, const float* b, int col,
                               float (&sums)[kM][kN]) {
    for (int i = 0; i < kM; ++i) {
        for (int j = 0; j < kN; ++j) sums[i][j] = 0;
    }
#pragma unroll 4
    for (int d = 0; d < kD; d += 4) {
        float4 left[kM], right[kN];
#pragma unroll
        for (int i = 0; i < kM; ++i)
            left[i] = *reinterpret_cast<const float4*>(a + (row + i) * kTileRow<kD> + d);
#pragma unroll
        for (int j = 0; j < kN; ++j)
            right[j] = *reinterpret_cast<const float4*>(b + (col + 16 * j) * kTileRow<kD> + d);
#pragma unroll
        for (int i = 0; i < kM; ++i) {
#pragma unroll
            for (int j = 0; j < kN; ++j) sums[i][j] = dot(left[i], right[j], sums[i][j]);
        }
    }
}

// sums[i][j] += sum over s of p[s * step + (row + i) * across] b[s, col + 16 j].
template <int kM, int kN, int kDepth, int kD>
__device__ void weigh(const float* p, int across, int step, int row, const float* b, int col,
                      float (&sums)[kM][kN]) {
#pragma unroll 4
    for (int s = 0; s < kDepth; ++s) {
        float weight[kM], value[kN];
#pragma unroll
        for (int i = 0; i < kM; ++i) weight[i] = p[s * step + (row + i) * across];
#pragma unroll
        for (int j = 0; j < kN; ++j) value[j] = b[s * kTileRow<kD> + col + 16 * j];
#pragma unroll
        for (int i = 0; i < kM; ++i) {
#pragma unroll
            for (int j = 0; j < kN; ++j) sums[i][j] = fmaf(weight[i], value[j], sums[i][j]);
        }
    }
}

// Calls launch(Width<kD>()) for the narrowest tile that holds the head.
template <int kD>
struct Width {
    static constexpr int kValue = kD;
};
template <class Launch>
void with_width(int64_t head_dim, const Launch& launch) {
    if (head_dim <= 32) return launch(Width<32>());
    if (head_dim <= 64) return launch(Width<64>());
    if (head_dim <= 96) return launch(Width<96>());
    launch(Width<128>());
}

// Allows the kernel its dynamic shared memory, above 48 KiB (at most 96 KiB: sm_70's limit).
template <class Kernel>
void allow_shared(Kernel kernel, size_t bytes) {
    static_cast<void>(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                           static_cast<int>(bytes)));
}

}  // namespace ferry::ops::cuda
