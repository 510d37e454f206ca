// What RMSNorm and LayerNorm are to the kernels of their backward pass.
#pragma once

#include "norm_row.h"
#include "rotation.h"

namespace ferry::ops::cuda {

// The sums of a norm's backward pass over a row, and what follows from them.
struct NormRow {
    float mean, r;
};
struct Rms {
    static constexpr int kSums = 1;
    static constexpr bool kBiased = false;
    const float* rstd;
    __device__ NormRow row(int64_t i) const { return {0, rstd[i]}; }
    __device__ static void add(float w, float d, float x, NormRow, float (&sums)[kSums]) {
        sums[0] += w * d * x;
    }
    __device__ static void divide(const double (&totals)[kSums], NormRow row, double share,
                                  float (&levels)[kSums]) {
        const double wide = row.r;
        levels[0] = static_cast<float>(wide * wide * wide * totals[0] * share);
    }
    __device__ static float own(float w, float d, float x, NormRow row,
                                const float (&levels)[kSums]) {
        return w * d * row.r - x * levels[0];
    }
    __device__ static float normed(float x, NormRow row) { return x * row.r; }
};
struct Layered {
    static constexpr int kSums = 2;
    static constexpr bool kBiased = true;
    const float* stats;
    int64_t rows;
    __device__ NormRow row(int64_t i) const { return {stats[i], stats[rows + i]}; }
    __device__ static void add(float w, float d, float x, NormRow row, float (&sums)[kSums]) {
        const float slope = w * d;
        sums[0] += slope;
        sums[1] += slope * normed(x, row);
    }
    __device__ static void divide(const double (&totals)[kSums], NormRow, double share,
                                  float (&levels)[kSums]) {
        for (int k = 0; k < kSums; ++k) levels[k] = static_cast<float>(totals[k] * share);
    }
    __device__ static float own(float w, float d, float x, NormRow row,
                                const float (&levels)[kSums]) {
        return row.r * (w * d - levels[0] - normed(x, row) * levels[1]);
    }
    __device__ static float normed(float x, NormRow row) { return (x - row.mean) * row.r; }
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

// The gradients of a pack of columns, summed over rows.
template <class Norm>
struct NormTerm {
    Norm norm;
    ConstView dy, x;
    Runs runs;
    static constexpr int kTogether = 2;
    struct Raw {
        RawPack x, d;
        NormRow row;
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

}  // namespace ferry::ops::cuda
