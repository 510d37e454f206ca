// Causal attention tile by tile, in fp32: the scores of a tile of queries against a tile of keys,
// the softmax taken online, so that no row of scores ever exists as a whole. Needs nothing that
// Volta lacks.
#include "ops/cuda/shared/kernels.h"
#include "ops/cuda/shared/launch.h"
#include "softmax.h"
#include "tile.h"

namespace ferry::ops::cuda {
namespace {

constexpr int kTile = 64;
constexpr int kScoreRow = kTile + 4;

template <int kD>
constexpr size_t kForwardBytes = sizeof(float) * (2 * kTile * kTileRow<kD> + kTile * kScoreRow);

// A block a tile of queries of one head of one sequence.
template <int kD>
__global__ void __launch_bounds__(kTileThreads)
    forward_kernel(Attention shape, ConstView q, ConstView k, ConstView v, View out, float* lse) {
    extern __shared__ float4 room[];
    float* queries = reinterpret_cast<float*>(room);
    float* keys = queries + kTile * kTileRow<kD>;  // then values
    float* weights = keys + kTile * kTileRow<kD>;
    constexpr int kOut = kD / 16;
    const int row = static_cast<int>(threadIdx.x) / 16 * kRows;
    const int col = static_cast<int>(threadIdx.x) % 16;
    const int64_t tile = gridDim.x - 1 - blockIdx.x;  // the longest rows first
    const int64_t head = blockIdx.y, kv_head = head / (shape.heads / shape.kv_heads);
    const int64_t base = blockIdx.z * shape.sequence, first = tile * kTile;
    const auto scale = static_cast<float>(shape.scale);
    load_tile<kTile, kD>(queries, q, base, first, shape.sequence, head, shape.head_dim);
    Softmax state;
    float sums[kRows][kOut];
    for (auto& row_sums : sums) {
        for (float& sum : row_sums) sum = 0;
    }
    for (int64_t key = shape.first_key(first) / kTile * kTile; key <= first; key += kTile) {
        __syncthreads();
        load_tile<kTile, kD>(keys, k, base, key, shape.sequence, kv_head, shape.head_dim);
        __syncthreads();
        float scores[kRows][kCols], shrink[kRows];
        inner_products<kRows, kCols, kD>(queries, row, keys, col, scores);
        for (int i = 0; i < kRows; ++i) {
            for (int j = 0; j < kCols; ++j) {
                const bool seen = sees(shape, first + row + i, key + col + 16 * j);
                scores[i][j] = seen ? scores[i][j] * scale : -INFINITY;
            }
        }
        soften(scores, state, shrink);
        for (int i = 0; i < kRows; ++i) {
            for (int j = 0; j < kCols; ++j)
                weights[(row + i) * kScoreRow + col + 16 * j] = scores[i][j];
            for (int j = 0; j < kOut; ++j) sums[i][j] *= shrink[i];
        }
        __syncthreads();
        load_tile<kTile, kD>(keys, v, base, key, shape.sequence, kv_head, shape.head_dim);
        __syncthreads();
        weigh<kRows, kOut, kTile, kD>(weights, kScoreRow, 1, row, keys, col, sums);
    }
    for (int i = 0; i < kRows; ++i) {
        const int64_t token = first + row + i;
        if (token >= shape.sequence) break;
        for (int j = 0; j < kOut; ++j) {
            const int64_t c = col + 16 * j;
            if (c < shape.head_dim)
                store(sums[i][j] / state.sum[i], out, base + token, head * shape.head_dim + c);
        }
        if (col == 0) lse[shape.lse_index(base + token, head)] = state.top[i] + logf(state.sum[i]);
    }
}

}  // namespace

bool has_tensor_cores_for(DType type) {
    static const int major = [] {
        int found = 0;
        cudaDeviceGetAttribute(&found, cudaDevAttrComputeCapabilityMajor, 0);
        return found;
    }();
    return type == DType::f16 ? major >= 7 : type == DType::bf16 && major >= 8;
}

void attention_forward(const Attention& shape, ConstView q, ConstView k, ConstView v, View out,
                       float* lse, cudaStream_t stream) {
    if (has_tensor_cores_for(q.type)) {
        return tensor_attention_forward(shape, q, k, v, out, lse, stream);
    }
    const dim3 blocks(blocks_for(shape.sequence, kTile), static_cast<unsigned>(shape.heads),
                      static_cast<unsigned>(shape.sequences));
    with_width(shape.head_dim, [&](auto width) {
        constexpr int kD = decltype(width)::kValue;
        allow_shared(forward_kernel<kD>, kForwardBytes<kD>);
        forward_kernel<kD>
            <<<blocks, kTileThreads, kForwardBytes<kD>, stream>>>(shape, q, k, v, out, lse);
    });
    check_launch("attention forward");
}

}  // namespace ferry::ops::cuda
