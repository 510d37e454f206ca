// Causal attention on tensor cores: attention.cu with the products of a tile done by warps.
#include "ops/cuda/shared/kernels.h"
#include "ops/cuda/shared/launch.h"
#include "softmax.h"
#include "tensor_tile.h"
#include "tile.h"

namespace ferry::ops::cuda {
namespace {

constexpr int kTile = 64;
constexpr int kScoreRow = wide_row(kTile), kWeightRow = narrow_row(kTile);
constexpr size_t kScoreBytes = 2 * 2 * kTile * kWeightRow;  // scores, then their two halves
static_assert(kScoreBytes >= sizeof(float) * kTile * kScoreRow);

template <int kD>
constexpr size_t kForwardBytes = 2 * 2 * kTile* narrow_row(kD) +
                                 sizeof(float) * kTile* wide_row(kD) + kScoreBytes;

// Shared memory of a block.
template <class T, int kD>
struct Room {
    T *queries, *keys;     // [kTile, kD]; keys, then values
    float *sums, *scores;  // [kTile, kD], [kTile, kTile]
    T *high, *low;         // [kTile, kTile] in the place of the scores
    __device__ explicit Room(float4* room) {
        queries = reinterpret_cast<T*>(room);
        keys = queries + kTile * narrow_row(kD);
        sums = reinterpret_cast<float*>(keys + kTile * narrow_row(kD));
        scores = sums + kTile * wide_row(kD);
        high = reinterpret_cast<T*>(scores);
        low = high + kTile * kWeightRow;
    }
};

// Adds the weighted values to the sums: each warp a row of tiles and half of its columns.
template <class T, int kD>
__device__ void add_values(const Room<T, kD>& room, int warp) {
    constexpr int kN = kD / 32;
    const int row = warp / 2 * kSide, col = warp % 2 * kN * kSide;
    Sums sums[kN];
    float* at = room.sums + row * wide_row(kD) + col;
    for (int j = 0; j < kN; ++j)
        wmma::load_matrix_sync(sums[j], at + kSide * j, wide_row(kD), wmma::mem_row_major);
    weigh_tile<RowsOfA<T>, kTile, kN, kD>(room.high + row * kWeightRow, room.low + row * kWeightRow,
                                          kWeightRow, kSide, room.keys, col, sums);
    for (int j = 0; j < kN; ++j)
        wmma::store_matrix_sync(at + kSide * j, sums[j], wide_row(kD), wmma::mem_row_major);
}

template <class T, int kD>
__device__ void forward(const Attention& shape, const ConstView& q, const ConstView& k,
                        const ConstView& v, const View& out, float* lse, float4* memory) {
    const Room<T, kD> room(memory);
    const int warp = static_cast<int>(threadIdx.x) / 32;
    const int row = static_cast<int>(threadIdx.x) / 16 * kRows;
    const int col = static_cast<int>(threadIdx.x) % 16;
    const int64_t tile = gridDim.x - 1 - blockIdx.x;  // the longest rows first
    const int64_t head = blockIdx.y, kv_head = head / (shape.heads / shape.kv_heads);
    const int64_t base = blockIdx.z * shape.sequence, first = tile * kTile;
    const auto scale = static_cast<float>(shape.scale);
    load_narrow<kTile, kD>(room.queries, q, base, first, shape.sequence, head, shape.head_dim);
    for (int i = static_cast<int>(threadIdx.x); i < kTile * wide_row(kD); i += kTileThreads)
        room.sums[i] = 0;
    Softmax state;
    for (int64_t key = shape.first_key(first) / kTile * kTile; key <= first; key += kTile) {
        __syncthreads();
        load_narrow<kTile, kD>(room.keys, k, base, key, shape.sequence, kv_head, shape.head_dim);
        __syncthreads();
        for (int j = 0; j < 2; ++j) {
            const int r = warp / 2 * kSide, c = (warp % 2 * 2 + j) * kSide;
            wmma::store_matrix_sync(room.scores + r * kScoreRow + c,
                                    inner_tile<kD>(room.queries, r, room.keys, c), kScoreRow,
                                    wmma::mem_row_major);
        }
        __syncthreads();
        float scores[kRows][kCols], shrink[kRows];
        for (int i = 0; i < kRows; ++i) {
            for (int j = 0; j < kCols; ++j) {
                const bool seen = sees(shape, first + row + i, key + col + 16 * j);
                const float score = room.scores[(row + i) * kScoreRow + col + 16 * j];
                scores[i][j] = seen ? score * scale : -INFINITY;
            }
        }
        soften(scores, state, shrink);
        __syncthreads();
        load_narrow<kTile, kD>(room.keys, v, base, key, shape.sequence, kv_head, shape.head_dim);
        for (int i = 0; i < kRows; ++i) {
            for (int j = 0; j < kCols; ++j) {
                const int at = (row + i) * kWeightRow + col + 16 * j;
                split(scores[i][j], room.high[at], room.low[at]);
            }
            for (int j = 0; j < kD / 16; ++j)
                room.sums[(row + i) * wide_row(kD) + col + 16 * j] *= shrink[i];
        }
        __syncthreads();
        add_values(room, warp);
    }
    __syncthreads();
    for (int i = 0; i < kRows; ++i) {
        const int64_t token = first + row + i;
        if (token >= shape.sequence) break;
        for (int64_t c = col; c < shape.head_dim; c += 16) {
            store(room.sums[(row + i) * wide_row(kD) + c] / state.sum[i], out, base + token,
                  head * shape.head_dim + c);
        }
        if (col == 0) lse[shape.lse_index(base + token, head)] = state.top[i] + logf(state.sum[i]);
    }
}

// A block a tile of queries of one head of one sequence.
template <class T, int kD>
__global__ void __launch_bounds__(kTileThreads)
    forward_kernel(Attention shape, ConstView q, ConstView k, ConstView v, View out, float* lse) {
    extern __shared__ float4 memory[];
    if constexpr (kMultiplies<T>) forward<T, kD>(shape, q, k, v, out, lse, memory);
}

template <class T>
void launch(const Attention& shape, ConstView q, ConstView k, ConstView v, View out, float* lse,
            cudaStream_t stream) {
    const dim3 blocks(blocks_for(shape.sequence, kTile), static_cast<unsigned>(shape.heads),
                      static_cast<unsigned>(shape.sequences));
    with_width(shape.head_dim, [&](auto width) {
        constexpr int kD = decltype(width)::kValue;
        allow_shared(forward_kernel<T, kD>, kForwardBytes<kD>);
        forward_kernel<T, kD>
            <<<blocks, kTileThreads, kForwardBytes<kD>, stream>>>(shape, q, k, v, out, lse);
    });
}

}  // namespace

void tensor_attention_forward(const Attention& shape, ConstView q, ConstView k, ConstView v,
                              View out, float* lse, cudaStream_t stream) {
    if (q.type == DType::f16) launch<__half>(shape, q, k, v, out, lse, stream);
    if (q.type == DType::bf16) launch<__nv_bfloat16>(shape, q, k, v, out, lse, stream);
    check_launch("attention forward on tensor cores");
}

}  // namespace ferry::ops::cuda
