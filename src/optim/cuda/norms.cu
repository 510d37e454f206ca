// Norm leaves, casts, and whether the optimizer's kernels run at all. Compiled without contraction
// (cmake/cuda.cmake).
#include <string>

#include "ferry/device.h"
#include "ferry/error.h"
#include "formulas.h"
#include "launch.h"
#include "memory.h"

namespace ferry::optim::cuda {
namespace {

constexpr int kLanes = 16;    // lanes of the norm's tree of sums: half a warp
constexpr int kTogether = 8;  // elements of a thread where both arrays allow it

// count is a multiple of kCount.
template <DType kType, int kCount>
__global__ void cast_kernel(const float* p, int64_t count, void* weight) {
    const int64_t i = thread_index() * kCount;
    if (i < count) store_rounded<kType, kCount>(weight, i, load<kCount>(p, i));
}

// Half a warp a leaf, a thread a lane of the tree. Every thread of a warp takes part in the
// shuffles, also beyond the last leaf.
template <DType kType>
__global__ void norms_kernel(const void* gradient, int64_t count, float* leaves) {
    const int64_t leaf = thread_index() / kLanes;
    const int lane = static_cast<int>(threadIdx.x) % kLanes;
    const int64_t end = min(count, (leaf + 1) * kLeaf);
    float sum = 0;
#pragma unroll 16
    for (int64_t i = leaf * kLeaf + lane; i < end; i += kLanes) {
        const float g = flush(load_as_f32<kType, 1>(gradient, i).at[0], kLeastGradient);
        sum = sum + g * g;
    }
    for (int half = kLanes / 2; half >= 1; half /= 2) {
        sum = sum + __shfl_down_sync(0xffffffffu, sum, static_cast<unsigned>(half), kLanes);
    }
    if (lane == 0 && leaf * kLeaf < count) leaves[leaf] = sum;
}

}  // namespace

void check_launch(const char* kernel) {
    const cudaError_t error = cudaGetLastError();
    // Device::check names what failed before this call.
    if (error == cudaSuccess || gpu_work_failed()) return;
    throw Error(
        Trouble::internal,
        {.what = "CUDA did not start the optimizer's kernel",
         .where = kernel,
         .measured = std::string(cudaGetErrorName(error)) + ", " + cudaGetErrorString(error),
         .remedy = "update on the CPU, or build for this GPU (FERRY_CUDA_ARCHITECTURES)"});
}

bool available() {
    int devices = 0;
    cudaFuncAttributes attributes;
    const bool runs = cudaGetDeviceCount(&devices) == cudaSuccess && devices > 0 &&
                      cudaFuncGetAttributes(&attributes, norms_kernel<DType::f32>) == cudaSuccess;
    cudaGetLastError();  // leaves no error behind for who asks next
    return runs;
}

void recast(const float* p, int64_t count, DType weight_type, void* weight, void* stream) {
    FERRY_CHECK(count >= 0 && (count == 0 || (p && weight)));
    const int64_t w_bytes = size_of(weight_type);
    FERRY_CHECK(aligned(p, 4) && aligned(weight, w_bytes));
    const bool may_pack = aligned(p, 16) && aligned(weight, 16);
    const int64_t together = may_pack ? round_down(count, kTogether) : 0;
    auto* on = static_cast<cudaStream_t>(stream);
    auto* rest = static_cast<char*>(weight) + together * w_bytes;
    with_type(weight_type, [&](auto type) {
        constexpr DType kType = decltype(type)::kValue;
        if (together > 0) {
            cast_kernel<kType, kTogether>
                <<<blocks_for(together / kTogether), kThreads, 0, on>>>(p, together, weight);
        }
        if (count > together) {
            cast_kernel<kType, 1><<<blocks_for(count - together), kThreads, 0, on>>>(
                p + together, count - together, rest);
        }
    });
    check_launch("recast");
}

void leaf_norms(const void* gradient, DType type, int64_t count, float* leaves, void* stream) {
    FERRY_CHECK(count >= 0 && (count == 0 || (gradient && leaves)));
    FERRY_CHECK(aligned(gradient, size_of(type)) && aligned(leaves, 4));
    if (count == 0) return;
    const unsigned blocks = blocks_for(leaves_of(count) * kLanes);
    with_type(type, [&](auto constant) {
        norms_kernel<decltype(constant)::kValue>
            <<<blocks, kThreads, 0, static_cast<cudaStream_t>(stream)>>>(gradient, count, leaves);
    });
    check_launch("leaf norms");
}

}  // namespace ferry::optim::cuda
