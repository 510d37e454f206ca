// The backward pass of attention on tensor cores: attention_backward.cu with the products of a tile
// done by warps. 64 rows of what is summed for, 32 of what is summed over.
#include "backward_inputs.h"
#include "ops/cuda/shared/kernels.h"
#include "ops/cuda/shared/launch.h"
#include "tensor_tile.h"
#include "tile.h"

namespace ferry::ops::cuda {
namespace {

constexpr int kOwn = 64, kOther = 32;
constexpr int kEach = kOwn * kOther / kTileThreads;  // scores of a thread

// Scores and slopes; in their place then the halves of both.
constexpr size_t kScoreBytes = 4 * 2 * kOwn * narrow_row(kOther);

template <int kD>
constexpr size_t kBackwardBytes = 2 * 2 * (kOwn + kOther) * narrow_row(kD)   // two tiles a side
                                  + kScoreBytes + 2 * sizeof(float) * kOwn;  // lse and delta

// Shared memory of a block with kQ queries and kK keys at a time.
template <class T, int kD, int kQ, int kK>
struct Room {
    static constexpr int kScoreRow = wide_row(kK), kHalfRow = narrow_row(kK);
    static_assert(4 * sizeof(T) * kQ * kHalfRow <= kScoreBytes);
    static_assert(2 * sizeof(float) * kQ * kScoreRow <= kScoreBytes);
    T *queries, *douts, *keys, *values;
    float *scores, *slopes, *lse, *delta;
    T* halves[4];  // high and low of probabilities and slopes, in their place

    __device__ explicit Room(float4* memory) {
        queries = reinterpret_cast<T*>(memory);
        douts = queries + kQ * narrow_row(kD);
        keys = douts + kQ * narrow_row(kD);
        values = keys + kK * narrow_row(kD);
        scores = reinterpret_cast<float*>(values + kK * narrow_row(kD));
        slopes = scores + kQ * kScoreRow;
        lse = scores + kScoreBytes / sizeof(float);
        delta = lse + kQ;
        for (int i = 0; i < 4; ++i) halves[i] = reinterpret_cast<T*>(scores) + i * kQ * kHalfRow;
    }
    __device__ void load_queries(const BackwardInputs& in, int64_t base, int64_t first,
                                 int64_t head) {
        const Attention& s = in.shape;
        load_narrow<kQ, kD>(queries, in.q, base, first, s.sequence, head, s.head_dim);
        load_narrow<kQ, kD>(douts, in.dout, base, first, s.sequence, head, s.head_dim);
        in.load_lse_and_delta<kQ>(lse, delta, base, first, head);
    }
    __device__ void load_keys(const BackwardInputs& in, int64_t base, int64_t first,
                              int64_t kv_head) {
        const Attention& s = in.shape;
        load_narrow<kK, kD>(keys, in.k, base, first, s.sequence, kv_head, s.head_dim);
        load_narrow<kK, kD>(values, in.v, base, first, s.sequence, kv_head, s.head_dim);
    }
    // Probabilities (where kWithWeights) and slopes of the tiles that are loaded, in halves.
    template <bool kWithWeights>
    __device__ void score(const Attention& s, int64_t query, int64_t key) {
        const int warp = static_cast<int>(threadIdx.x) / 32;
        const int r = warp / (kK / kSide) * kSide, c = warp % (kK / kSide) * kSide;
        wmma::store_matrix_sync(scores + r * kScoreRow + c, inner_tile<kD>(queries, r, keys, c),
                                kScoreRow, wmma::mem_row_major);
        wmma::store_matrix_sync(slopes + r * kScoreRow + c, inner_tile<kD>(douts, r, values, c),
                                kScoreRow, wmma::mem_row_major);
        __syncthreads();
        const auto scale = static_cast<float>(s.scale);
        float p[kEach], ds[kEach];
        for (int i = 0; i < kEach; ++i) {
            const int e = static_cast<int>(threadIdx.x) + i * kTileThreads;
            const int row = e / kK, col = e % kK, at = row * kScoreRow + col;
            const bool seen = query + row < s.sequence && sees(s, query + row, key + col);
            p[i] = seen ? expf(scores[at] * scale - lse[row]) : 0.0f;
            ds[i] = p[i] * (slopes[at] - delta[row]) * scale;
        }
        __syncthreads();
        for (int i = 0; i < kEach; ++i) {
            const int e = static_cast<int>(threadIdx.x) + i * kTileThreads;
            const int at = e / kK * kHalfRow + e % kK;
            if constexpr (kWithWeights) split(p[i], halves[0][at], halves[1][at]);
            split(ds[i], halves[2][at], halves[3][at]);
        }
        __syncthreads();
    }
};

// Sums of kOwn rows, each warp a row of tiles and half of its columns, through shared memory.
template <int kD>
__device__ void store_sums(const Sums (&sums)[kD / 32], float* room, const View& to, int64_t base,
                           int64_t first, int64_t end, int64_t head, int64_t head_dim) {
    const int warp = static_cast<int>(threadIdx.x) / 32;
    const int row = warp / 2 * kSide, col = warp % 2 * (kD / 32) * kSide;
    __syncthreads();
    for (int j = 0; j < kD / 32; ++j) {
        wmma::store_matrix_sync(room + row * wide_row(kD) + col + kSide * j, sums[j], wide_row(kD),
                                wmma::mem_row_major);
    }
    __syncthreads();
    for (int i = static_cast<int>(threadIdx.x); i < kOwn * kD; i += kTileThreads) {
        const int r = i / kD, c = i % kD;
        if (first + r < end && c < head_dim)
            store(room[r * wide_row(kD) + c], to, base + first + r, head * head_dim + c);
    }
}

template <class T, int kD>
__device__ void queries_gradient(const BackwardInputs& in, const View& dq, float4* memory) {
    Room<T, kD, kOwn, kOther> room(memory);
    constexpr int kN = kD / 32, kHalfRow = Room<T, kD, kOwn, kOther>::kHalfRow;
    const Attention& s = in.shape;
    const int warp = static_cast<int>(threadIdx.x) / 32;
    const int row = warp / 2 * kSide, col = warp % 2 * kN * kSide;
    const int64_t head = blockIdx.y, base = blockIdx.z * s.sequence;
    const int64_t first = int64_t{gridDim.x - 1 - blockIdx.x} * kOwn;
    const int64_t end = min(first + kOwn, s.sequence);
    room.load_queries(in, base, first, head);
    Sums sums[kN];
    for (Sums& sum : sums) wmma::fill_fragment(sum, 0.0f);
    for (int64_t key = s.first_key(first) / kOther * kOther; key < end; key += kOther) {
        __syncthreads();
        room.load_keys(in, base, key, head / (s.heads / s.kv_heads));
        __syncthreads();
        room.template score<false>(s, first, key);
        weigh_tile<RowsOfA<T>, kOther, kN, kD>(room.halves[2] + row * kHalfRow,
                                               room.halves[3] + row * kHalfRow, kHalfRow, kSide,
                                               room.keys, col, sums);
    }
    store_sums<kD>(sums, reinterpret_cast<float*>(memory), dq, base, first, end, head, s.head_dim);
}

template <class T, int kD>
__device__ void keys_gradient(const BackwardInputs& in, const View& dk, const View& dv,
                              float4* memory) {
    Room<T, kD, kOther, kOwn> room(memory);
    constexpr int kN = kD / 32, kHalfRow = Room<T, kD, kOther, kOwn>::kHalfRow;
    const Attention& s = in.shape;
    const int warp = static_cast<int>(threadIdx.x) / 32;
    const int row = warp / 2 * kSide, col = warp % 2 * kN * kSide;
    const int64_t kv_head = blockIdx.y, base = blockIdx.z * s.sequence;
    const int64_t first = int64_t{blockIdx.x} * kOwn, together = s.heads / s.kv_heads;
    const int64_t last = s.end_query(min(first + kOwn, s.sequence) - 1);
    room.load_keys(in, base, first, kv_head);
    Sums dkeys[kN], dvalues[kN];
    for (int j = 0; j < kN; ++j) {
        wmma::fill_fragment(dkeys[j], 0.0f);
        wmma::fill_fragment(dvalues[j], 0.0f);
    }
    for (int64_t head = kv_head * together; head < (kv_head + 1) * together; ++head) {
        for (int64_t query = first; query < last; query += kOther) {
            __syncthreads();
            room.load_queries(in, base, query, head);
            __syncthreads();
            room.template score<true>(s, query, first);
            weigh_tile<ColsOfA<T>, kOther, kN, kD>(room.halves[0] + row, room.halves[1] + row,
                                                   kHalfRow, kSide * kHalfRow, room.douts, col,
                                                   dvalues);
            weigh_tile<ColsOfA<T>, kOther, kN, kD>(room.halves[2] + row, room.halves[3] + row,
                                                   kHalfRow, kSide * kHalfRow, room.queries, col,
                                                   dkeys);
        }
    }
    auto* wide = reinterpret_cast<float*>(memory);
    store_sums<kD>(dkeys, wide, dk, base, first, s.sequence, kv_head, s.head_dim);
    store_sums<kD>(dvalues, wide, dv, base, first, s.sequence, kv_head, s.head_dim);
}

// A block a tile of queries of one head of one sequence.
template <class T, int kD>
__global__ void __launch_bounds__(kTileThreads) queries_kernel(BackwardInputs in, View dq) {
    extern __shared__ float4 memory[];
    if constexpr (kMultiplies<T>) queries_gradient<T, kD>(in, dq, memory);
}

// A block a tile of keys of one key/value head of one sequence; the heads that read it in order.
template <class T, int kD>
__global__ void __launch_bounds__(kTileThreads) keys_kernel(BackwardInputs in, View dk, View dv) {
    extern __shared__ float4 memory[];
    if constexpr (kMultiplies<T>) keys_gradient<T, kD>(in, dk, dv, memory);
}

template <class T>
void launch(const BackwardInputs& in, View dq, View dk, View dv, cudaStream_t stream) {
    const Attention& s = in.shape;
    const unsigned tiles = blocks_for(s.sequence, kOwn);
    const auto sequences = static_cast<unsigned>(s.sequences);
    with_width(s.head_dim, [&](auto width) {
        constexpr int kD = decltype(width)::kValue;
        constexpr size_t kBytes = kBackwardBytes<kD>;
        allow_shared(queries_kernel<T, kD>, kBytes);
        allow_shared(keys_kernel<T, kD>, kBytes);
        const dim3 of_queries(tiles, static_cast<unsigned>(s.heads), sequences);
        const dim3 of_keys(tiles, static_cast<unsigned>(s.kv_heads), sequences);
        queries_kernel<T, kD><<<of_queries, kTileThreads, kBytes, stream>>>(in, dq);
        keys_kernel<T, kD><<<of_keys, kTileThreads, kBytes, stream>>>(in, dk, dv);
    });
}

}  // namespace

void tensor_attention_backward(const Attention& shape, ConstView q, ConstView k, ConstView v,
                               ConstView dout, const float* lse, const float* delta, View dq,
                               View dk, View dv, cudaStream_t stream) {
    const BackwardInputs in{shape, q, k, v, dout, lse, delta};
    if (q.type == DType::f16) launch<__half>(in, dq, dk, dv, stream);
    if (q.type == DType::bf16) launch<__nv_bfloat16>(in, dq, dk, dv, stream);
    check_launch("attention backward on tensor cores");
}

}  // namespace ferry::ops::cuda
