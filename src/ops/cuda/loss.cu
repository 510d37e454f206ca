// Softmax cross-entropy. A row stays in the registers of a block, or of a cluster of them where the
// GPU has clusters, while the next is under way; where it does not fit, a block reads it twice.
#include <cooperative_groups.h>
#include <cuda_pipeline.h>

#include <algorithm>
#include <cfloat>

#include "kernels.h"
#include "launch.h"
#include "pack.h"

namespace ferry::ops::cuda {
namespace {

constexpr int kThreads = 256;

// A thread's elements of a row, kThreads apart: the largest, and the sum of exp(element - largest).
// One pass: where a later element is larger, what was summed before shrinks.
struct Softened {
    float top = -FLT_MAX, sum = 0;
};
__device__ Softened soften(const float* in, int64_t cols) {
    constexpr int kAtOnce = 16;  // loads that are under way together
    Softened own;
    for (int64_t first = threadIdx.x; first < cols; first += int64_t{kAtOnce} * kThreads) {
        float x[kAtOnce];
#pragma unroll
        for (int k = 0; k < kAtOnce; ++k) {
            const int64_t c = first + int64_t{k} * kThreads;
            x[k] = c < cols ? in[c] : -INFINITY;
        }
        float top = own.top;
#pragma unroll
        for (int k = 0; k < kAtOnce; ++k) top = fmaxf(top, x[k]);
        own.sum *= expf(own.top - top);
        own.top = top;
#pragma unroll
        for (int k = 0; k < kAtOnce; ++k) own.sum += expf(x[k] - top);
    }
    return own;
}

struct Slope {
    float top, factor, own;
    int32_t target;
    __device__ float operator()(float logit, int64_t c) const {
        return c == target ? own : expf(logit - top) * factor;
    }
};

// In eights where rows begin at multiples of 16 bytes; else neighbours by neighbouring threads.
__device__ void store_slopes(const ConstView& logits, const View& to, int64_t row,
                             const Slope& slope) {
    const void *in = place_of(logits, row, 0), *out = place_of(to, row, 0);
    if (to.cols % kPack == 0 && whole(in, kPack) && whole(out, kPack)) {
        each_pack<kThreads>(to.cols, [&](int64_t col, int count) {
            Pack pack = load_pack(logits, row, col, count);
#pragma unroll
            for (int k = 0; k < kPack; ++k) pack.at[k] = slope(pack.at[k], col + k);
            store_pack(pack, to, row, col);
        });
        return;
    }
    const auto* values = static_cast<const float*>(in);
#pragma unroll 8
    for (int64_t c = threadIdx.x; c < to.cols; c += kThreads)
        store(slope(values[c], c), to, row, c);
}

__global__ void __launch_bounds__(kThreads) row_kernel(ConstView logits, const int32_t* targets,
                                                       float scale, View dlogits, double* losses) {
    const int64_t row = blockIdx.x;
    const int32_t target = targets[row];
    if (target < 0) {
        if (threadIdx.x == 0) losses[row] = 0;
        if (dlogits.data == nullptr) return;
        each_pack<kThreads>(dlogits.cols, [&](int64_t col, int count) {
            store_pack({{}, count}, dlogits, row, col);
        });
        return;
    }
    const float* in = static_cast<const float*>(logits.data) + row * logits.ld;
    const Softened own = soften(in, logits.cols);
    const float top = block_max<kThreads>(own.top);
    const double sum = block_sum<kThreads>(static_cast<double>(own.sum * expf(own.top - top)));
    const double of_target = static_cast<double>(in[target]) - static_cast<double>(top);
    if (threadIdx.x == 0) losses[row] = log(sum) - of_target;
    if (dlogits.data == nullptr) return;
    __syncthreads();  // dlogits may be logits, and the target's was read by all
    // p - 1 cancels where the model is sure: in double.
    const auto of_own = static_cast<float>((exp(of_target) / sum - 1) * static_cast<double>(scale));
    const auto factor = static_cast<float>(static_cast<double>(scale) / sum);
    store_slopes(logits, dlogits, row, {top, factor, of_own, target});
}

// ---------------------------------------------------------------- a row in registers

// Each of up to kMostBlocks blocks has kPieces fours of neighbours for each of its threads: two
// blocks of a multiprocessor then hold a row of 163,840 among eight of them.
constexpr int kHolders = 512, kPieces = 10, kFour = 4, kMostBlocks = 8;
constexpr int kResident = 2;  // blocks of a multiprocessor
constexpr int64_t kHeld = int64_t{kHolders} * kPieces * kFour;

bool has_clusters() {
    int device = 0, has = 0;
    if (cudaGetDevice(&device) != cudaSuccess) return false;
    cudaDeviceGetAttribute(&has, cudaDevAttrClusterLaunch, device);
    return has != 0;
}

// A thread's elements of a row: fours of neighbours kStep apart, the first of them at `first`, and
// so many up to the end of its block's part. They come by way of shared memory, a place of its own
// for each four, so that the next row is under way while this one is worked on.
constexpr int kStep = kHolders * kFour;
struct Part {
    int64_t first;
    int left;
    __device__ bool whole(int piece) const { return piece * kStep + kFour <= left; }
    __device__ bool has(int piece, int k) const { return piece * kStep + k < left; }
};

struct HeldRow {
    float x[kPieces][kFour];
    // in: of the row; room: of the thread.
    static __device__ void start(const float* in, const Part& part, float4* room) {
        const float* from = in + part.first;
        const bool aligned = reinterpret_cast<uintptr_t>(from) % 16 == 0;
#pragma unroll
        for (int p = 0; p < kPieces; ++p) {
            if (aligned && part.whole(p)) {
                __pipeline_memcpy_async(room + p * kHolders, from + p * kStep, 16);
                continue;
            }
#pragma unroll
            for (int k = 0; k < kFour; ++k) {
                if (!part.has(p, k)) break;
                float* to = reinterpret_cast<float*>(room + p * kHolders) + k;
                __pipeline_memcpy_async(to, from + p * kStep + k, 4);
            }
        }
    }
    // A logit that does not exist is -inf: its exponential is nothing.
    __device__ void take(const Part& part, const float4* room) {
#pragma unroll
        for (int p = 0; p < kPieces; ++p) {
            const float4* at = room + p * kHolders;
            if (part.whole(p)) {
                const float4 four = *at;
                x[p][0] = four.x;
                x[p][1] = four.y;
                x[p][2] = four.z;
                x[p][3] = four.w;
            } else {
#pragma unroll
                for (int k = 0; k < kFour; ++k)
                    x[p][k] = part.has(p, k) ? reinterpret_cast<const float*>(at)[k] : -INFINITY;
            }
        }
    }
    // Elements become exponentials of their distance to the largest of this thread.
    __device__ Softened soften() {
        Softened own;
#pragma unroll
        for (int p = 0; p < kPieces; ++p) {
#pragma unroll
            for (int k = 0; k < kFour; ++k) own.top = fmaxf(own.top, x[p][k]);
        }
#pragma unroll
        for (int p = 0; p < kPieces; ++p) {
#pragma unroll
            for (int k = 0; k < kFour; ++k) {
                x[p][k] = expf(x[p][k] - own.top);
                own.sum += x[p][k];
            }
        }
        return own;
    }
    __device__ void put(const View& to, int64_t row, const Part& part, float factor) const {
        void* at = const_cast<void*>(place_of(to, row, part.first));
        if (to.type == DType::f32) return put_wide(static_cast<float*>(at), part, factor);
        put_halves(static_cast<uint16_t*>(at), to.type, part, factor);
    }

private:
    __device__ void put_wide(float* at, const Part& part, float factor) const {
        const bool aligned = reinterpret_cast<uintptr_t>(at) % 16 == 0;
#pragma unroll
        for (int p = 0; p < kPieces; ++p) {
            if (aligned && part.whole(p)) {
                *reinterpret_cast<float4*>(at + p * kStep) = make_float4(
                    x[p][0] * factor, x[p][1] * factor, x[p][2] * factor, x[p][3] * factor);
                continue;
            }
#pragma unroll
            for (int k = 0; k < kFour; ++k) {
                if (part.has(p, k)) at[p * kStep + k] = x[p][k] * factor;
            }
        }
    }
    __device__ void put_halves(uint16_t* at, DType type, const Part& part, float factor) const {
        const bool aligned = reinterpret_cast<uintptr_t>(at) % 8 == 0;
#pragma unroll
        for (int p = 0; p < kPieces; ++p) {
            const uint32_t low = pair_of(x[p][0] * factor, x[p][1] * factor, type);
            const uint32_t high = pair_of(x[p][2] * factor, x[p][3] * factor, type);
            if (aligned && part.whole(p)) {
                *reinterpret_cast<uint2*>(at + p * kStep) = make_uint2(low, high);
                continue;
            }
#pragma unroll
            for (int k = 0; k < kFour; ++k) {
                const uint32_t pair = k < 2 ? low : high;
                if (part.has(p, k)) at[p * kStep + k] = static_cast<uint16_t>(pair >> (k % 2 * 16));
            }
        }
    }
};

// A thread block's part of its row, for the others.
struct Share {
    float top;
    double sum;
};

// The blocks of a row: a cluster, or one alone where there are none. All wait for each other; then
// each reads what the others have.
__device__ void meet() {
#if __CUDA_ARCH__ >= 900
    cooperative_groups::this_cluster().sync();
#else
    __syncthreads();
#endif
}
__device__ Share share_of([[maybe_unused]] int rank, Share* own) {
#if __CUDA_ARCH__ >= 900
    return *cooperative_groups::this_cluster().map_shared_rank(own, rank);
#else
    return *own;
#endif
}

// The blocks of a cluster have one row after the other, `stride` rows apart.
__global__ void __launch_bounds__(kHolders, kResident)
    held_kernel(ConstView logits, const int32_t* targets, float scale, View dlogits, double* losses,
                int blocks) {
    // Of this row and of the one before: when all have met again, nobody reads the older any more.
    __shared__ Share shares[2];
    extern __shared__ float4 rooms[];
    float4* room = rooms + threadIdx.x;
    const int stride = static_cast<int>(gridDim.x) / blocks, rows = static_cast<int>(logits.rows);
    const int rank = static_cast<int>(blockIdx.x) % blocks;
    const auto lane = static_cast<int>(threadIdx.x) % 32;
    const int64_t width = round_up(ceil_div(logits.cols, int64_t{blocks}), int64_t{kFour});
    const int64_t begin = rank * width, end = min(begin + width, logits.cols);
    const auto own_first = static_cast<int>(threadIdx.x) * kFour;
    const Part part{begin + own_first, static_cast<int>(end - begin) - own_first};
    const bool writes = dlogits.data != nullptr;
    const auto row_of = [&](int64_t row) {
        return static_cast<const float*>(logits.data) + row * logits.ld;
    };
    int row = static_cast<int>(blockIdx.x) / blocks;
    HeldRow::start(row_of(row), part, room);
    __pipeline_commit();
    int which = 0;
    for (int next = row + stride; row < rows; row = next, next += stride) {
        const int32_t target = targets[row];
        const float of_own = target < 0 ? 0 : row_of(row)[target];
        HeldRow held;
        __pipeline_wait_prior(0);
        held.take(part, room);
        if (next < rows) HeldRow::start(row_of(next), part, room);
        __pipeline_commit();
        if (target < 0) {  // all blocks of the cluster alike
            if (rank == 0 && threadIdx.x == 0) losses[row] = 0;
            if (writes) HeldRow{}.put(dlogits, row, part, 0);
            continue;
        }
        const Softened own = held.soften();
        const float block_top = block_max<kHolders>(own.top);
        const double block_total =
            block_sum<kHolders>(static_cast<double>(own.sum * expf(own.top - block_top)));
        which ^= 1;
        if (threadIdx.x == 0) shares[which] = {block_top, block_total};
        meet();  // behind this no block reads this row of logits any more: dlogits may be them
        Share other{-FLT_MAX, 0};
        if (lane < blocks) other = share_of(lane, &shares[which]);
        float top = other.top;
        for (int half = 16; half > 0; half /= 2)
            top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, half));
        const double its = other.sum * static_cast<double>(expf(other.top - top));
        double sum = 0;
        for (int b = 0; b < blocks; ++b) sum += __shfl_sync(0xffffffffu, its, b);
        const double of_target = static_cast<double>(of_own) - static_cast<double>(top);
        if (rank == 0 && threadIdx.x == 0) losses[row] = log(sum) - of_target;
        if (!writes) continue;
        const auto factor = static_cast<float>(static_cast<double>(scale) / sum);
        held.put(dlogits, row, part, factor * expf(own.top - top));
        const int64_t place = (target - begin) / kFour % kHolders;
        if (target >= begin && target < end && threadIdx.x == place) {
            // p - 1 cancels where the model is sure: in double.
            const double slope = (exp(of_target) / sum - 1) * static_cast<double>(scale);
            store(static_cast<float>(slope), dlogits, row, target);
        }
    }
    meet();  // none ends while the others may read its share
}

// Blocks, or clusters of them, that the GPU runs at once.
int64_t rows_at_once(const cudaLaunchConfig_t& config) {
    int clusters = 0, device = 0, multiprocessors = 0, of_each = 0;
    if (config.numAttrs > 0) {
        check_launch("cross-entropy",
                     cudaOccupancyMaxActiveClusters(&clusters, held_kernel, &config));
        return std::max(1, clusters);
    }
    check_launch("cross-entropy", cudaGetDevice(&device));
    cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
    cudaOccupancyMaxActiveBlocksPerMultiprocessor(&of_each, held_kernel, kHolders,
                                                  config.dynamicSmemBytes);
    return std::max(1, multiprocessors * of_each);
}

// Bytes of shared memory that a block's part of a row takes.
int64_t held_room(int64_t cols) {
    const int64_t blocks = ceil_div(cols, kHeld);
    const int64_t width = round_up(ceil_div(cols, blocks), int64_t{kFour});
    return ceil_div(width, int64_t{kHolders} * kFour) * kHolders * 16;
}

bool may_hold(int64_t cols) {
    if (cols > kHeld && (cols > kMostBlocks * kHeld || !has_clusters())) return false;
    int device = 0, most = 0;
    if (cudaGetDevice(&device) != cudaSuccess) return false;
    cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
    return held_room(cols) <= most - 2 * kKiB;  // what the kernel has beside it
}

// As many clusters as are at work at once, or one for each row. Rows do not depend on each other:
// how many a cluster has changes no result.
void start_held(ConstView logits, const int32_t* targets, float scale, View dlogits, double* losses,
                cudaStream_t stream) {
    const int64_t blocks = ceil_div(logits.cols, kHeld);
    const int64_t room = held_room(logits.cols);
    check_launch("cross-entropy",
                 cudaFuncSetAttribute(held_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                      static_cast<int>(room)));
    cudaLaunchAttribute cluster{};
    cluster.id = cudaLaunchAttributeClusterDimension;
    cluster.val.clusterDim.x = static_cast<unsigned>(blocks);
    cluster.val.clusterDim.y = cluster.val.clusterDim.z = 1;
    cudaLaunchConfig_t config{};
    config.blockDim = dim3(kHolders);
    config.dynamicSmemBytes = static_cast<size_t>(room);
    config.stream = stream;
    config.attrs = &cluster;
    config.numAttrs = blocks > 1 ? 1 : 0;
    config.gridDim = dim3(static_cast<unsigned>(logits.rows * blocks));
    const int64_t at_once = std::min<int64_t>(logits.rows, rows_at_once(config));
    config.gridDim = dim3(static_cast<unsigned>(at_once * blocks));
    cudaLaunchKernelEx(&config, held_kernel, logits, targets, scale, dlogits, losses,
                       static_cast<int>(blocks));
}

// Each thread adds every kThreads-th row, then a tree adds these sums.
__global__ void sum_kernel(const double* losses, int64_t rows, double* loss_sum) {
    double sum = 0;
#pragma unroll 8
    for (int64_t i = threadIdx.x; i < rows; i += kThreads) sum += losses[i];
    sum = block_sum<kThreads>(sum);
    if (threadIdx.x == 0) *loss_sum += sum;
}

}  // namespace

void cross_entropy(ConstView logits, const int32_t* targets, float scale, View dlogits,
                   double* loss_sum, double* losses, cudaStream_t stream) {
    FERRY_CHECK(logits.type == DType::f32 && logits.cols > 0);
    if (logits.rows == 0) return;
    if (may_hold(logits.cols)) {
        start_held(logits, targets, scale, dlogits, losses, stream);
    } else {
        row_kernel<<<blocks_for(logits.rows, 1), kThreads, 0, stream>>>(logits, targets, scale,
                                                                        dlogits, losses);
    }
    sum_kernel<<<1, kThreads, 0, stream>>>(losses, logits.rows, loss_sum);
    check_launch("cross-entropy");
}

}  // namespace ferry::ops::cuda
