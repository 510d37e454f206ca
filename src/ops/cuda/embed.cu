// Embedding rows, and their gradient summed per row in token order without atomics.
#include <algorithm>

#include "element.h"
#include "kernels.h"
#include "launch.h"

namespace ferry::ops::cuda {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32;
constexpr int kTogether = 4;  // columns of a thread
constexpr int64_t kCols = int64_t{kThreads} * kTogether;

__global__ void embed_kernel(const int32_t* tokens, ConstView table, ConstView positions, View x) {
    const int64_t row = blockIdx.x, token = tokens[row];
    for (int64_t c = threadIdx.x; c < x.cols; c += kThreads) {
        float value = load(table, token, c);
        if (positions.data != nullptr) value += load(positions, row % positions.rows, c);
        store(value, x, row, c);
    }
}

// A thread an element of a position's row.
__global__ void positions_backward_kernel(ConstView dx, int64_t sequence, float* gradient) {
    const int64_t col = int64_t{blockIdx.y} * kThreads + threadIdx.x, position = blockIdx.x;
    if (col >= dx.cols) return;
    float sum = gradient[position * dx.cols + col];
    for (int64_t row = position; row < dx.rows; row += sequence) sum += load(dx, row, col);
    gradient[position * dx.cols + col] = sum;
}

// The positions of [first, first + kThreads) whose token is `token`, in order, into `found`.
__device__ int matches(const int32_t* tokens, int64_t first, int64_t from, int64_t end,
                       int32_t token, int* found) {
    __shared__ int counts[kWarps];
    const int64_t i = first + threadIdx.x;
    const bool match = i >= from && i < end && tokens[i] == token;
    const unsigned ballot = __ballot_sync(0xffffffffu, match);
    const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
    __syncthreads();  // `found` and `counts` may still be read
    if (lane == 0) counts[warp] = __popc(ballot);
    __syncthreads();
    int before = 0, all = 0;
    for (int w = 0; w < kWarps; ++w) {
        if (w < warp) before += counts[w];
        all += counts[w];
    }
    if (match) found[before + __popc(ballot & ((1u << lane) - 1u))] = static_cast<int>(threadIdx.x);
    __syncthreads();
    return all;
}

// A block a position and kCols columns: the first position of a token adds the rows of all its
// positions, in order; the others have nothing to do.
__global__ void embed_backward_kernel(const int32_t* tokens, ConstView dx, float* gradient) {
    __shared__ int found[kThreads];
    const int64_t position = blockIdx.x;
    const int32_t token = tokens[position];
    for (int64_t first = 0; first < position; first += kThreads) {
        const int64_t i = first + threadIdx.x;
        if (__syncthreads_or(i < position && tokens[i] == token)) return;
    }
    const int64_t col = int64_t{blockIdx.y} * kCols + threadIdx.x;
    float* row = gradient + token * dx.cols;
    float sum[kTogether];
    for (int k = 0; k < kTogether; ++k) {
        const int64_t c = col + int64_t{k} * kThreads;
        sum[k] = c < dx.cols ? row[c] : 0.0f;
    }
    for (int64_t first = position / kThreads * kThreads; first < dx.rows; first += kThreads) {
        const int count = matches(tokens, first, position, dx.rows, token, found);
        for (int m = 0; m < count; ++m) {
            const int64_t from = first + found[m];
            for (int k = 0; k < kTogether; ++k) {
                const int64_t c = col + int64_t{k} * kThreads;
                if (c < dx.cols) sum[k] += load(dx, from, c);
            }
        }
    }
    for (int k = 0; k < kTogether; ++k) {
        const int64_t c = col + int64_t{k} * kThreads;
        if (c < dx.cols) row[c] = sum[k];
    }
}

}  // namespace

void embed(const int32_t* tokens, ConstView table, ConstView positions, View x,
           cudaStream_t stream) {
    if (x.rows == 0) return;
    embed_kernel<<<blocks_for(x.rows, 1), kThreads, 0, stream>>>(tokens, table, positions, x);
    check_launch("embed");
}

void positions_backward(ConstView dx, int64_t sequence, float* gradient, cudaStream_t stream) {
    if (dx.rows == 0) return;
    const dim3 blocks(blocks_for(std::min(sequence, dx.rows), 1), blocks_for(dx.cols, kThreads));
    positions_backward_kernel<<<blocks, kThreads, 0, stream>>>(dx, sequence, gradient);
    check_launch("positions backward");
}

void embed_backward(const int32_t* tokens, ConstView dx, float* gradient, cudaStream_t stream) {
    if (dx.rows == 0) return;
    const dim3 blocks(blocks_for(dx.rows, 1), blocks_for(dx.cols, kCols));
    embed_backward_kernel<<<blocks, kThreads, 0, stream>>>(tokens, dx, gradient);
    check_launch("embed backward");
}

}  // namespace ferry::ops::cuda
