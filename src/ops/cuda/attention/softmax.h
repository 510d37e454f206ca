// The online softmax of a tile of 64 x 64 scores: a thread of 16 x 16 holds kRows rows of it and
// kCols columns 16 apart.
#pragma once

namespace ferry::ops::cuda {

constexpr int kRows = 4, kCols = 4;

// State of a thread's rows; the 16 threads of a row hold the same.
struct Softmax {
    float top[kRows] = {-INFINITY, -INFINITY, -INFINITY, -INFINITY};
    float sum[kRows] = {};
};

__device__ inline float over_row(float value, bool largest) {
    for (int half = 8; half > 0; half /= 2) {
        const float other = __shfl_xor_sync(0xffffffffu, value, half, 16);
        value = largest ? fmaxf(value, other) : value + other;
    }
    return value;
}

// Scores become probabilities against the new top; what was summed before shrinks by `shrink`.
__device__ inline void soften(float (&scores)[kRows][kCols], Softmax& state,
                              float (&shrink)[kRows]) {
    for (int i = 0; i < kRows; ++i) {
        float top = scores[i][0];
        for (int j = 1; j < kCols; ++j) top = fmaxf(top, scores[i][j]);
        top = fmaxf(state.top[i], over_row(top, true));
        // Where no key has been seen so far, -inf - -inf would be NaN.
        const float level = top == -INFINITY ? 0.0f : top;
        shrink[i] = expf(state.top[i] - level);
        float sum = 0;
        for (int j = 0; j < kCols; ++j) {
            scores[i][j] = expf(scores[i][j] - level);
            sum += scores[i][j];
        }
        state.sum[i] = state.sum[i] * shrink[i] + over_row(sum, false);
        state.top[i] = top;
    }
}

}  // namespace ferry::ops::cuda
