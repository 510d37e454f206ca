// Gradients that are kept (feedback.h).
#include "zero/feedback.h"

#include "launch.h"
#include "leaves.h"

namespace ferry::zero::cuda {
namespace {

// A block of threads a leaf of all runs.
template <class T>
__global__ void __launch_bounds__(kThreads)
    keep_kernel(const float* gradient, int ranks, int64_t apart, int64_t count, T* kept,
                float* leaves) {
    __shared__ float4 room[kLeaf / kQuad];
    const int64_t first = int64_t{blockIdx.x} * kLeaf;
    float sum = 0;
    for (int rank = 0; rank < ranks; ++rank) {
        const float* from = gradient + rank * apart + first;
        T* to = kept + rank * count + first;
        for (int quad = static_cast<int>(threadIdx.x); quad < kLeaf / kQuad; quad += kThreads) {
            const Quad values = load_quad(from + quad * kQuad);
            store_quad(values, to + quad * kQuad);
            room[quad] = squares_of<T>(values);
        }
        __syncthreads();
        if (threadIdx.x < kRow) sum = sum + leaf_of(reinterpret_cast<const float*>(room));
        __syncthreads();  // the next run's squares take the room
    }
    if (threadIdx.x == 0) leaves[blockIdx.x] = sum;
}

}  // namespace

void keep(const float* gradient, int ranks, int64_t apart, int64_t count, DType wire, void* kept,
          float* leaves, void* stream) {
    FERRY_CHECK(ranks > 0 && count % kLeaf == 0 && apart % kQuad == 0, "runs of whole leaves");
    FERRY_CHECK(aligned(gradient, kQuad * 4) && aligned(kept, kQuad * size_of(wire)));
    if (count == 0) return;
    const auto blocks = static_cast<unsigned>(count / kLeaf);
    with_type(wire, [&](auto element) {
        using T = decltype(element);
        keep_kernel<<<blocks, kThreads, 0, static_cast<cudaStream_t>(stream)>>>(
            gradient, ranks, apart, count, static_cast<T*>(kept), leaves);
    });
    check_launch("keep gradients");
}

}  // namespace ferry::zero::cuda
