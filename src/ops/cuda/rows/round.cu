// An accumulated gradient becomes its one value, with norm leaves of the CPU's bits. The file must
// be compiled without contraction (cmake/cuda.cmake); tests/tree/cuda_flags_test.py looks at it.
#include "ops/cuda/shared/kernels.h"
#include "ops/cuda/shared/launch.h"
#include "ops/cuda/shared/pack.h"

namespace ferry::ops::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kLanes = 16;  // lanes of the tree of sums
constexpr int kLeaf = 4096;

// A block a leaf. All threads round; the squares wait in shared memory for the few that add them in
// the tree's order: a lane's 256 sums depend on each other, and a chunk has but a few hundred
// leaves.
template <class Load>
__device__ void round_leaf(Load load, int64_t count, DType type, void* wire, float* leaves) {
    __shared__ float4 room[kLeaf / 4];
    auto* squares = reinterpret_cast<float*>(room);
    const int64_t first = int64_t{blockIdx.x} * kLeaf;
    const View out{wire, type, 1, count, count};
    for (int i = static_cast<int>(threadIdx.x) * kPack; i < kLeaf; i += kThreads * kPack) {
        const int here = pack_count(count, first + i);
        Pack pack = load(first + i, here);
        float square[kPack];
        for (int k = 0; k < kPack; ++k) {
            const float once = rounded(pack.at[k], type);
            pack.at[k] = once;
            // Below 2^-60 a gradient counts as zero, as in the update; a NaN compares false and
            // stays.
            const float value = fabsf(once) < 0x1p-60F ? 0.0f : once;
            square[k] = value * value;
        }
        if (here > 0) store_pack(pack, out, 0, first + i);
        room[i / 4] = make_float4(square[0], square[1], square[2], square[3]);
        room[i / 4 + 1] = make_float4(square[4], square[5], square[6], square[7]);
    }
    __syncthreads();
    if (threadIdx.x >= kLanes) return;
    float sum = 0;
#pragma unroll 16
    for (int i = 0; i < kLeaf; i += kLanes) sum = sum + squares[i + threadIdx.x];
    for (int half = kLanes / 2; half >= 1; half /= 2)
        sum = sum + __shfl_down_sync(0xffffu, sum, static_cast<unsigned>(half), kLanes);
    if (threadIdx.x == 0) leaves[blockIdx.x] = sum;
}

__global__ void __launch_bounds__(kThreads)
    round_kernel(const float* accumulator, int64_t count, DType type, void* wire, float* leaves) {
    round_leaf(
        [=](int64_t at, int here) {
            return widen_pack(fetch_pack(accumulator + at, DType::f32, here), DType::f32, here);
        },
        count, type, wire, leaves);
}

__global__ void __launch_bounds__(kThreads) sum_kernel(ConstView parts, void* wire, float* leaves) {
    const auto sum = [&](int64_t at, int here) {
        Pack total = load_pack(parts, 0, at, here);
        for (int64_t rank = 1; rank < parts.rows; ++rank) {
            const Pack piece = load_pack(parts, rank, at, here);
            for (int k = 0; k < kPack; ++k) total.at[k] = total.at[k] + piece.at[k];
        }
        return total;
    };
    round_leaf(sum, parts.cols, parts.type, wire, leaves);
}

}  // namespace

void round_gradient(const float* accumulator, int64_t count, DType wire_type, void* wire,
                    float* leaves, cudaStream_t stream) {
    if (count == 0) return;
    round_kernel<<<blocks_for(count, kLeaf), kThreads, 0, stream>>>(accumulator, count, wire_type,
                                                                    wire, leaves);
    check_launch("round gradient");
}

void sum_gradient(ConstView parts, void* wire, float* leaves, cudaStream_t stream) {
    if (parts.cols == 0) return;
    sum_kernel<<<blocks_for(parts.cols, kLeaf), kThreads, 0, stream>>>(parts, wire, leaves);
    check_launch("sum gradient");
}

}  // namespace ferry::ops::cuda
