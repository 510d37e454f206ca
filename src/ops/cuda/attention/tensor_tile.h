// Tiles of attention for tensor cores: operands of 16 bits in shared memory, sums in fp32. What is
// no operand of 16 bits already (probabilities, slopes) is split into two that are, so that the
// products keep 16 bits of it and more: the result is that of fp32 arithmetic, rounded once.
#pragma once

#include <mma.h>

#include <type_traits>

#include "ops/cuda/shared/element.h"
#include "tile.h"

namespace ferry::ops::cuda {

namespace wmma = nvcuda::wmma;

constexpr int kSide = 16;  // rows and columns of one warp's product

// Volta multiplies fp16, Ampere bf16 too.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
template <class T>
constexpr bool kMultiplies = std::is_same_v<T, __half>;
#else
template <class T>
constexpr bool kMultiplies = true;
#endif

// Elements from row to row of a tile of 16 bits, and of one in fp32: rows begin in other banks.
constexpr int narrow_row(int cols) { return cols + 8; }
constexpr int wide_row(int cols) { return cols + 4; }

template <class T>
__device__ T narrow(float value) {
    if constexpr (std::is_same_v<T, __half>) return __float2half_rn(value);
    if constexpr (!std::is_same_v<T, __half>) return __float2bfloat16_rn(value);
}
__device__ inline float widen(__half value) { return __half2float(value); }
__device__ inline float widen(__nv_bfloat16 value) { return __bfloat162float(value); }

// value = high + low, nearly.
template <class T>
__device__ void split(float value, T& high, T& low) {
    high = narrow<T>(value);
    low = narrow<T>(value - widen(high));
}

template <class T>
using RowsOfA = wmma::fragment<wmma::matrix_a, kSide, kSide, kSide, T, wmma::row_major>;
template <class T>
using ColsOfA = wmma::fragment<wmma::matrix_a, kSide, kSide, kSide, T, wmma::col_major>;
template <class T>
using RowsOfB = wmma::fragment<wmma::matrix_b, kSide, kSide, kSide, T, wmma::row_major>;
template <class T>
using ColsOfB = wmma::fragment<wmma::matrix_b, kSide, kSide, kSide, T, wmma::col_major>;
using Sums = wmma::fragment<wmma::accumulator, kSide, kSide, kSide, float>;

// Whether rows of a head can be read 16 bytes at a time.
__device__ inline bool packs(const ConstView& v, int64_t head_dim) {
    return head_dim % 8 == 0 && v.ld % 8 == 0 && reinterpret_cast<uintptr_t>(v.data) % 16 == 0;
}

// Rows [first, first + kRows) of one head's columns; zeros beyond `end` and beyond the head.
template <int kRows, int kD, class T>
__device__ void load_narrow(T* tile, const ConstView& from, int64_t base, int64_t first,
                            int64_t end, int64_t head, int64_t head_dim) {
    const T* data = static_cast<const T*>(from.data) + (base + first) * from.ld + head * head_dim;
    if (packs(from, head_dim)) {
        each_of_tile<kRows, kD, 8>(end - first, head_dim, [&](int row, int col, bool inside) {
            *reinterpret_cast<uint4*>(tile + row * narrow_row(kD) + col) =
                inside ? *reinterpret_cast<const uint4*>(data + row * from.ld + col) : uint4{};
        });
        return;
    }
    each_of_tile<kRows, kD>(end - first, head_dim, [&](int row, int col, bool inside) {
        tile[row * narrow_row(kD) + col] = inside ? data[row * from.ld + col] : narrow<T>(0.0f);
    });
}

// The kSide x kSide products at (row, col) of a b^T, over kD columns of both.
template <int kD, class T>
__device__ Sums inner_tile(const T* a, int row, const T* b, int col) {
    Sums sums;
    wmma::fill_fragment(sums, 0.0f);
#pragma unroll
    for (int d = 0; d < kD; d += kSide) {
        RowsOfA<T> left;
        ColsOfB<T> right;
        wmma::load_matrix_sync(left, a + row * narrow_row(kD) + d, narrow_row(kD));
        wmma::load_matrix_sync(right, b + col * narrow_row(kD) + d, narrow_row(kD));
        wmma::mma_sync(sums, left, right, sums);
    }
    return sums;
}

// sums[j] += the rows of (high + low) at `left` times the columns col + 16 j of b, over kDepth rows
// of b. A is RowsOfA, or ColsOfA where `high` and `low` hold its transpose; from one kSide of the
// depth to the next they move by `step` elements.
template <class A, int kDepth, int kN, int kD, class T>
__device__ void weigh_tile(const T* high, const T* low, int ld, int step, const T* b, int col,
                           Sums (&sums)[kN]) {
#pragma unroll
    for (int s = 0; s < kDepth; s += kSide) {
        A upper, lower;
        wmma::load_matrix_sync(upper, high + s / kSide * step, static_cast<unsigned>(ld));
        wmma::load_matrix_sync(lower, low + s / kSide * step, static_cast<unsigned>(ld));
#pragma unroll
        for (int j = 0; j < kN; ++j) {
            RowsOfB<T> right;
            wmma::load_matrix_sync(right, b + s * narrow_row(kD) + col + kSide * j, narrow_row(kD));
            wmma::mma_sync(sums[j], lower, right, sums[j]);
            wmma::mma_sync(sums[j], upper, right, sums[j]);
        }
    }
}

}  // namespace ferry::ops::cuda
