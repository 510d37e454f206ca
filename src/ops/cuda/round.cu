// An accumulated gradient becomes its one value, with norm leaves of the CPU's bits. The file must
// be compiled without contraction (cmake/cuda.cmake); tests/unit/cuda_flags_test.py looks at it.
#include "element.h"
#include "kernels.h"
#include "launch.h"

namespace ferry::ops::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kLanes = 16;  // of the tree: half a warp a leaf
constexpr int64_t kLeaf = 4096;

// Every thread of a warp takes part in the shuffles, also beyond the last leaf.
__global__ void round_kernel(const float* accumulator, int64_t count, DType type, void* wire,
                             float* leaves) {
    const int64_t leaf = (int64_t{blockIdx.x} * kThreads + threadIdx.x) / kLanes;
    const int64_t end = min(count, (leaf + 1) * kLeaf);
    float sum = 0;
#pragma unroll 8
    for (int64_t i = leaf * kLeaf + threadIdx.x % kLanes; i < end; i += kLanes) {
        const float once = rounded(accumulator[i], type);
        store(once, wire, type, i);
        // Below 2^-60 a gradient counts as zero, as in the update; a NaN compares false and stays.
        const float value = fabsf(once) < 0x1p-60F ? 0.0f : once;
        sum = sum + value * value;
    }
    for (int half = kLanes / 2; half >= 1; half /= 2) {
        sum = sum + __shfl_down_sync(0xffffffffu, sum, static_cast<unsigned>(half), kLanes);
    }
    if (threadIdx.x % kLanes == 0 && leaf * kLeaf < count) leaves[leaf] = sum;
}

}  // namespace

void round_gradient(const float* accumulator, int64_t count, DType wire_type, void* wire,
                    float* leaves, cudaStream_t stream) {
    if (count == 0) return;
    const unsigned blocks = blocks_for(ceil_div(count, kLeaf) * kLanes, kThreads);
    round_kernel<<<blocks, kThreads, 0, stream>>>(accumulator, count, wire_type, wire, leaves);
    check_launch("round gradient");
}

}  // namespace ferry::ops::cuda
