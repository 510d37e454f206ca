// Embedding rows, and their gradient summed per row in token order without atomics.
#include <algorithm>

#include "kernels.h"
#include "launch.h"
#include "pack.h"

namespace ferry::ops::cuda {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32;
constexpr int kTogether = 4;  // columns of a thread
constexpr int kAtOnce = 8;    // rows whose loads are under way together; they are added in order
constexpr int64_t kWindow = 8 * kThreads;  // positions that a block looks at together
constexpr int64_t kCols = int64_t{kThreads} * kTogether;

__global__ void embed_kernel(const int32_t* tokens, ConstView table, ConstView positions,
                             const int32_t* document_start, View x) {
    const auto [row, col, count] = cell_of(x.cols);
    if (count <= 0) return;
    const RawPack raw = fetch_pack(table, tokens[row], col, count);
    Pack pack = widen_pack(raw, table.type, count);
    if (positions.data != nullptr) {
        const int64_t before = document_start == nullptr ? 0 : document_start[row];
        const Pack added = load_pack(positions, row % positions.rows - before, col, count);
#pragma unroll
        for (int k = 0; k < kPack; ++k) pack.at[k] += added.at[k];
    }
    store_pack(pack, x, row, col);
}

// A thread a column, whose positions recur at no fixed distance.
__global__ void documents_backward_kernel(ConstView dx, int64_t sequence,
                                          const int32_t* document_start, float* gradient) {
    const int64_t col = int64_t{blockIdx.x} * kThreads + threadIdx.x;
    if (col >= dx.cols) return;
    for (int64_t row = 0; row < dx.rows; ++row)
        gradient[(row % sequence - document_start[row]) * dx.cols + col] += load(dx, row, col);
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

// Whether any of [first, first + kWindow) that lies in [from, end) is `token`: most windows have
// none, and one look passes over them.
__device__ bool any_match(const int32_t* tokens, int64_t first, int64_t from, int64_t end,
                          int32_t token) {
    bool match = false;
#pragma unroll
    for (int64_t k = 0; k < kWindow; k += kThreads) {
        const int64_t i = first + k + threadIdx.x;
        match |= i >= from && i < end && tokens[i] == token;
    }
    return __syncthreads_or(match);
}

// Adds at most kAtOnce of the rows found, from the m-th on, in order.
__device__ void add_rows(const ConstView& dx, int64_t first, const int* found, int m, int count,
                         int64_t col, float (&sum)[kTogether]) {
    float ahead[kAtOnce][kTogether];
#pragma unroll
    for (int n = 0; n < kAtOnce; ++n) {
        const int64_t from = first + found[min(m + n, count - 1)];
#pragma unroll
        for (int k = 0; k < kTogether; ++k) {
            const int64_t c = min(col + int64_t{k} * kThreads, dx.cols - 1);
            ahead[n][k] = load(dx, from, c);
        }
    }
#pragma unroll
    for (int n = 0; n < kAtOnce; ++n) {
        if (m + n >= count) break;
#pragma unroll
        for (int k = 0; k < kTogether; ++k) sum[k] += ahead[n][k];
    }
}

// A block a position and kCols columns: the first position of a token adds the rows of all its
// positions, in order; the others have nothing to do.
__global__ void embed_backward_kernel(const int32_t* tokens, ConstView dx, float* gradient) {
    __shared__ int found[kThreads];
    const int64_t position = blockIdx.x;
    const int32_t token = tokens[position];
    for (int64_t first = 0; first < position; first += kWindow) {
        if (any_match(tokens, first, 0, position, token)) return;
    }
    const int64_t col = int64_t{blockIdx.y} * kCols + threadIdx.x;
    float* row = gradient + token * dx.cols;
    float sum[kTogether];
    for (int k = 0; k < kTogether; ++k) {
        const int64_t c = col + int64_t{k} * kThreads;
        sum[k] = c < dx.cols ? row[c] : 0.0f;
    }
    for (int64_t window = position / kWindow * kWindow; window < dx.rows; window += kWindow) {
        if (!any_match(tokens, window, position, dx.rows, token)) continue;
        for (int64_t first = window; first < min(window + kWindow, dx.rows); first += kThreads) {
            const int count = matches(tokens, first, position, dx.rows, token, found);
            for (int m = 0; m < count; m += kAtOnce) add_rows(dx, first, found, m, count, col, sum);
        }
    }
    for (int k = 0; k < kTogether; ++k) {
        const int64_t c = col + int64_t{k} * kThreads;
        if (c < dx.cols) row[c] = sum[k];
    }
}

}  // namespace

void embed(const int32_t* tokens, ConstView table, ConstView positions,
           const int32_t* document_start, View x, cudaStream_t stream) {
    if (x.rows == 0 || x.cols == 0) return;
    const Cells cells = cells_of(x.rows, x.cols);
    embed_kernel<<<cells.blocks, cells.threads, 0, stream>>>(tokens, table, positions,
                                                             document_start, x);
    check_launch("embed");
}

void positions_backward(ConstView dx, int64_t sequence, const int32_t* document_start,
                        float* gradient, cudaStream_t stream) {
    if (dx.rows == 0) return;
    if (document_start != nullptr) {
        documents_backward_kernel<<<blocks_for(dx.cols, kThreads), kThreads, 0, stream>>>(
            dx, sequence, document_start, gradient);
        return check_launch("positions backward");
    }
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
