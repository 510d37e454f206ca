// The backward pass of attention, recomputing the scores: once for the queries' gradient, once for
// the keys' and values', each sum in one thread in a fixed order.
#include "backward_inputs.h"
#include "ops/cuda/shared/kernels.h"
#include "ops/cuda/shared/launch.h"
#include "tile.h"

namespace ferry::ops::cuda {
namespace {

constexpr int kTile = 32, kRows = 2, kCols = 2;
constexpr int kScoreRow = kTile + 4;

template <int kD>
constexpr size_t kBackwardBytes = sizeof(float) *
                                  (4 * kTile * kTileRow<kD> + 2 * kTile * kScoreRow + 2 * kTile);

// Shared memory of a block.
template <int kD>
struct Room {
    float *queries, *douts, *keys, *values;  // [kTile, kD]
    float *weights, *slopes;                 // [kTile queries, kTile keys]
    float *lse, *delta;                      // [kTile]
    __device__ explicit Room(float4* room) {
        queries = reinterpret_cast<float*>(room);
        douts = queries + kTile * kTileRow<kD>;
        keys = douts + kTile * kTileRow<kD>;
        values = keys + kTile * kTileRow<kD>;
        weights = values + kTile * kTileRow<kD>;
        slopes = weights + kTile * kScoreRow;
        lse = slopes + kTile * kScoreRow;
        delta = lse + kTile;
    }
    __device__ void load_queries(const BackwardInputs& in, int64_t base, int64_t first,
                                 int64_t head) {
        const Attention& s = in.shape;
        load_tile<kTile, kD>(queries, in.q, base, first, s.sequence, head, s.head_dim);
        load_tile<kTile, kD>(douts, in.dout, base, first, s.sequence, head, s.head_dim);
        in.load_lse_and_delta<kTile>(lse, delta, base, first, head);
    }
    __device__ void load_keys(const BackwardInputs& in, int64_t base, int64_t first,
                              int64_t kv_head) {
        const Attention& s = in.shape;
        load_tile<kTile, kD>(keys, in.k, base, first, s.sequence, kv_head, s.head_dim);
        load_tile<kTile, kD>(values, in.v, base, first, s.sequence, kv_head, s.head_dim);
    }
    // Probabilities and the slopes of the scores, of the tiles that are loaded.
    __device__ void score(const Attention& s, int64_t query, int64_t key, int row, int col) {
        float scores[kRows][kCols], dp[kRows][kCols];
        inner_products<kRows, kCols, kD>(queries, row, keys, col, scores);
        inner_products<kRows, kCols, kD>(douts, row, values, col, dp);
        const auto scale = static_cast<float>(s.scale);
        for (int i = 0; i < kRows; ++i) {
            for (int j = 0; j < kCols; ++j) {
                const int r = row + i, c = col + 16 * j;
                const bool seen = query + r < s.sequence && sees(s, query + r, key + c);
                const float p = seen ? expf(scores[i][j] * scale - lse[r]) : 0.0f;
                weights[r * kScoreRow + c] = p;
                slopes[r * kScoreRow + c] = p * (dp[i][j] - delta[r]) * scale;
            }
        }
    }
};

template <int kN>
__device__ void store_rows(const float (&sums)[kRows][kN], const View& to, int64_t base,
                           int64_t first, int64_t end, int64_t head, int64_t head_dim, int col) {
    for (int i = 0; i < kRows; ++i) {
        if (first + i >= end) return;
        for (int j = 0; j < kN; ++j) {
            const int64_t c = col + 16 * j;
            if (c < head_dim) store(sums[i][j], to, base + first + i, head * head_dim + c);
        }
    }
}

// delta = sum over the head of dout * out; a warp a row.
__global__ void delta_kernel(Attention shape, ConstView out, ConstView dout, float* delta) {
    const int64_t tokens = shape.sequences * shape.sequence;
    const int64_t i = (int64_t{blockIdx.x} * kTileThreads + threadIdx.x) / 32;
    if (i >= tokens * shape.heads) return;
    const int64_t token = i % tokens, head = i / tokens;
    float sum = 0;
    for (int64_t c = threadIdx.x % 32; c < shape.head_dim; c += 32) {
        const int64_t col = head * shape.head_dim + c;
        sum += load(dout, token, col) * load(out, token, col);
    }
    for (int half = 16; half > 0; half /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, half);
    if (threadIdx.x % 32 == 0) delta[shape.lse_index(token, head)] = sum;
}

// A block a tile of queries of one head of one sequence.
template <int kD>
__global__ void __launch_bounds__(kTileThreads) queries_kernel(BackwardInputs in, View dq) {
    extern __shared__ float4 memory[];
    Room<kD> room(memory);
    constexpr int kOut = kD / 16;
    const Attention& s = in.shape;
    const int row = static_cast<int>(threadIdx.x) / 16 * kRows;
    const int col = static_cast<int>(threadIdx.x) % 16;
    const int64_t head = blockIdx.y, base = blockIdx.z * s.sequence;
    const int64_t first = int64_t{gridDim.x - 1 - blockIdx.x} * kTile;
    room.load_queries(in, base, first, head);
    float sums[kRows][kOut] = {};
    for (int64_t key = s.first_key(first) / kTile * kTile; key <= first; key += kTile) {
        __syncthreads();
        room.load_keys(in, base, key, in.kv_head(head));
        __syncthreads();
        room.score(s, first, key, row, col);
        __syncthreads();
        weigh<kRows, kOut, kTile, kD>(room.slopes, kScoreRow, 1, row, room.keys, col, sums);
    }
    store_rows(sums, dq, base, first + row, s.sequence, head, s.head_dim, col);
}

// A block a tile of keys of one key/value head of one sequence; the heads that read it in order.
template <int kD>
__global__ void __launch_bounds__(kTileThreads) keys_kernel(BackwardInputs in, View dk, View dv) {
    extern __shared__ float4 memory[];
    Room<kD> room(memory);
    constexpr int kOut = kD / 16;
    const Attention& s = in.shape;
    const int row = static_cast<int>(threadIdx.x) / 16 * kRows;
    const int col = static_cast<int>(threadIdx.x) % 16;
    const int64_t kv_head = blockIdx.y, base = blockIdx.z * s.sequence;
    const int64_t first = int64_t{blockIdx.x} * kTile, together = s.heads / s.kv_heads;
    const int64_t end = s.end_query(min(first + kTile, s.sequence) - 1);
    room.load_keys(in, base, first, kv_head);
    float dkeys[kRows][kOut] = {}, dvalues[kRows][kOut] = {};
    for (int64_t head = kv_head * together; head < (kv_head + 1) * together; ++head) {
        for (int64_t query = first; query < end; query += kTile) {
            __syncthreads();
            room.load_queries(in, base, query, head);
            __syncthreads();
            room.score(s, query, first, row, col);
            __syncthreads();
            weigh<kRows, kOut, kTile, kD>(room.weights, 1, kScoreRow, row, room.douts, col,
                                          dvalues);
            weigh<kRows, kOut, kTile, kD>(room.slopes, 1, kScoreRow, row, room.queries, col, dkeys);
        }
    }
    store_rows(dkeys, dk, base, first + row, s.sequence, kv_head, s.head_dim, col);
    store_rows(dvalues, dv, base, first + row, s.sequence, kv_head, s.head_dim, col);
}

}  // namespace

void attention_delta(const Attention& shape, ConstView out, ConstView dout, float* delta,
                     cudaStream_t stream) {
    const int64_t rows = shape.sequences * shape.sequence * shape.heads;
    delta_kernel<<<blocks_for(rows * 32, kTileThreads), kTileThreads, 0, stream>>>(shape, out, dout,
                                                                                   delta);
    check_launch("attention's delta");
}

void attention_backward(const Attention& shape, ConstView q, ConstView k, ConstView v,
                        ConstView out, ConstView dout, const float* lse, View dq, View dk, View dv,
                        float* delta, cudaStream_t stream) {
    attention_delta(shape, out, dout, delta, stream);
    if (has_tensor_cores_for(q.type)) {
        return tensor_attention_backward(shape, q, k, v, dout, lse, delta, dq, dk, dv, stream);
    }
    const BackwardInputs in{shape, q, k, v, dout, lse, delta};
    const unsigned tiles = blocks_for(shape.sequence, kTile);
    const auto sequences = static_cast<unsigned>(shape.sequences);
    with_width(shape.head_dim, [&](auto width) {
        constexpr int kD = decltype(width)::kValue;
        constexpr size_t kBytes = kBackwardBytes<kD>;
        allow_shared(queries_kernel<kD>, kBytes);
        allow_shared(keys_kernel<kD>, kBytes);
        const dim3 of_queries(tiles, static_cast<unsigned>(shape.heads), sequences);
        const dim3 of_keys(tiles, static_cast<unsigned>(shape.kv_heads), sequences);
        queries_kernel<kD><<<of_queries, kTileThreads, kBytes, stream>>>(in, dq);
        keys_kernel<kD><<<of_keys, kTileThreads, kBytes, stream>>>(in, dk, dv);
    });
    check_launch("attention backward");
}

}  // namespace ferry::ops::cuda
