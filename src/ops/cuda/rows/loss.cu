// Softmax cross-entropy. A row stays in the registers of a block, or of a cluster of them where the
// GPU has clusters; where it does not fit, a block reads it twice.
#include <cooperative_groups.h>

#include <cfloat>

#include "ops/cuda/shared/kernels.h"
#include "ops/cuda/shared/launch.h"
#include "ops/cuda/shared/pack.h"

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

// ---------------------------------------------------------------- columns of several ranks

constexpr int64_t kParts = Ops::kLossParts;

__global__ void __launch_bounds__(kThreads)
    parts_kernel(ConstView logits, const int32_t* own_targets, double* parts) {
    const int64_t row = blockIdx.x;
    const float* in = static_cast<const float*>(logits.data) + row * logits.ld;
    const Softened own = soften(in, logits.cols);
    const float top = block_max<kThreads>(own.top);
    const double sum = block_sum<kThreads>(static_cast<double>(own.sum * expf(own.top - top)));
    if (threadIdx.x != 0) return;
    const int32_t target = own_targets[row];
    parts[row * kParts] = static_cast<double>(top);
    parts[row * kParts + 1] = sum;
    parts[row * kParts + 2] = target < 0 ? 0 : static_cast<double>(in[target]);
}

// Every thread adds up the few numbers of all ranks, in their order.
__global__ void __launch_bounds__(kThreads)
    of_parts_kernel(ConstView logits, Ops::LossTargets targets, const double* parts, int ranks,
                    float scale, View dlogits, double* losses) {
    const int64_t row = blockIdx.x, rows = gridDim.x;
    if (targets.targets[row] < 0) {
        if (threadIdx.x == 0) losses[row] = 0;
        if (dlogits.data == nullptr) return;
        each_pack<kThreads>(dlogits.cols, [&](int64_t col, int count) {
            store_pack({{}, count}, dlogits, row, col);
        });
        return;
    }
    const double* told = parts + row * kParts;
    double top = told[0], sum = 0, of_target = 0;
    for (int rank = 1; rank < ranks; ++rank) top = fmax(top, told[rank * rows * kParts]);
    for (int rank = 0; rank < ranks; ++rank) {
        const double* its = told + rank * rows * kParts;
        sum += its[1] * exp(its[0] - top);
        of_target += its[2];
    }
    of_target -= top;
    if (threadIdx.x == 0) losses[row] = log(sum) - of_target;
    if (dlogits.data == nullptr) return;
    const auto of_own = static_cast<float>((exp(of_target) / sum - 1) * static_cast<double>(scale));
    const auto factor = static_cast<float>(static_cast<double>(scale) / sum);
    store_slopes(logits, dlogits, row, {static_cast<float>(top), factor, of_own, targets.own[row]});
}

// ---------------------------------------------------------------- a row in registers

// Each of up to kMostBlocks blocks has kPacks times four neighbours for each of its threads: two
// blocks of a multiprocessor then hold a row of 163,840 among eight of them.
constexpr int kHolders = 512, kPacks = 10, kFour = 4, kMostBlocks = 8;
constexpr int64_t kHeld = int64_t{kHolders} * kPacks * kFour;

bool has_clusters() {
    int device = 0, has = 0;
    if (cudaGetDevice(&device) != cudaSuccess) return false;
    cudaDeviceGetAttribute(&has, cudaDevAttrClusterLaunch, device);
    return has != 0;
}

struct HeldRow {
    float x[kPacks][kFour];
    // A logit that does not exist is -inf: its exponential is nothing.
    __device__ void fetch(const float* in, int64_t first, int64_t end, bool aligned) {
#pragma unroll
        for (int p = 0; p < kPacks; ++p) {
            const int64_t c = first + (int64_t{p} * kHolders + threadIdx.x) * kFour;
            if (aligned && c + kFour <= end) {
                const float4 four = *reinterpret_cast<const float4*>(in + c);
                x[p][0] = four.x;
                x[p][1] = four.y;
                x[p][2] = four.z;
                x[p][3] = four.w;
            } else {
#pragma unroll
                for (int k = 0; k < kFour; ++k) x[p][k] = c + k < end ? in[c + k] : -INFINITY;
            }
        }
    }
    // Elements become exponentials of their distance to the largest of this thread.
    __device__ Softened soften() {
        Softened own;
#pragma unroll
        for (int p = 0; p < kPacks; ++p) {
#pragma unroll
            for (int k = 0; k < kFour; ++k) own.top = fmaxf(own.top, x[p][k]);
        }
#pragma unroll
        for (int p = 0; p < kPacks; ++p) {
#pragma unroll
            for (int k = 0; k < kFour; ++k) {
                x[p][k] = expf(x[p][k] - own.top);
                own.sum += x[p][k];
            }
        }
        return own;
    }
    __device__ void put(const View& to, int64_t row, int64_t first, int64_t end, float factor,
                        bool aligned) {
#pragma unroll
        for (int p = 0; p < kPacks; ++p) {
            const int64_t c = first + (int64_t{p} * kHolders + threadIdx.x) * kFour;
            if (aligned && c + kFour <= end) {
                const float a = x[p][0] * factor, b = x[p][1] * factor;
                const float d = x[p][2] * factor, e = x[p][3] * factor;
                void* at = const_cast<void*>(place_of(to, row, c));
                if (to.type == DType::f32) {
                    *static_cast<float4*>(at) = make_float4(a, b, d, e);
                } else {
                    *static_cast<uint2*>(at) =
                        make_uint2(pair_of(a, b, to.type), pair_of(d, e, to.type));
                }
            } else {
#pragma unroll
                for (int k = 0; k < kFour; ++k) {
                    if (c + k < end) store(x[p][k] * factor, to, row, c + k);
                }
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
// each reads what the others have; none ends while that may still be read.
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
__device__ void say_read() {
#if __CUDA_ARCH__ >= 900
    asm volatile("barrier.cluster.arrive.aligned;" ::: "memory");
#endif
}
__device__ void wait_until_read() {
#if __CUDA_ARCH__ >= 900
    asm volatile("barrier.cluster.wait.aligned;" ::: "memory");
#endif
}

__global__ void __launch_bounds__(kHolders, 2)
    held_kernel(ConstView logits, const int32_t* targets, float scale, View dlogits, double* losses,
                int blocks) {
    __shared__ Share share;
    const int64_t row = blockIdx.x / blocks;
    const int rank = static_cast<int>(blockIdx.x) % blocks;
    const int64_t width = round_up(ceil_div(logits.cols, int64_t{blocks}), int64_t{kFour});
    const int64_t first = rank * width, end = min(first + width, logits.cols);
    const int32_t target = targets[row];
    const bool aligned = reinterpret_cast<uintptr_t>(place_of(logits, row, 0)) % 16 == 0;
    const bool writes = dlogits.data != nullptr;
    const auto to = reinterpret_cast<uintptr_t>(writes ? place_of(dlogits, row, 0) : nullptr);
    const bool aligned_to = to % 16 == 0;
    HeldRow held;
    if (target < 0) {  // all blocks of the cluster alike
        if (rank == 0 && threadIdx.x == 0) losses[row] = 0;
        if (!writes) return;
#pragma unroll
        for (int p = 0; p < kPacks; ++p) {
#pragma unroll
            for (int k = 0; k < kFour; ++k) held.x[p][k] = 0;
        }
        held.put(dlogits, row, first, end, 0, aligned_to);
        return;
    }
    const float* in = static_cast<const float*>(logits.data) + row * logits.ld;
    held.fetch(in, first, end, aligned);
    const float of_own = in[target];
    const Softened own = held.soften();
    const float block_top = block_max<kHolders>(own.top);
    const double block_total =
        block_sum<kHolders>(static_cast<double>(own.sum * expf(own.top - block_top)));
    if (threadIdx.x == 0) share = {block_top, block_total};
    meet();  // behind this no block reads logits any more: dlogits may be them
    const auto lane = static_cast<int>(threadIdx.x) % 32;
    Share other{-FLT_MAX, 0};
    if (lane < blocks) other = share_of(lane, &share);
    __syncwarp();
    say_read();
    float top = other.top;
    for (int half = 16; half > 0; half /= 2)
        top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, half));
    const double part = other.sum * static_cast<double>(expf(other.top - top));
    double sum = 0;
    for (int b = 0; b < blocks; ++b) sum += __shfl_sync(0xffffffffu, part, b);
    const double of_target = static_cast<double>(of_own) - static_cast<double>(top);
    if (rank == 0 && threadIdx.x == 0) losses[row] = log(sum) - of_target;
    if (writes) {
        const auto factor = static_cast<float>(static_cast<double>(scale) / sum);
        held.put(dlogits, row, first, end, factor * expf(own.top - top), aligned_to);
        const int64_t place = (target - first) / kFour % kHolders;
        if (target >= first && target < end && threadIdx.x == place) {
            // p - 1 cancels where the model is sure: in double.
            const double slope = (exp(of_target) / sum - 1) * static_cast<double>(scale);
            store(static_cast<float>(slope), dlogits, row, target);
        }
    }
    wait_until_read();
}

void start_held(ConstView logits, const int32_t* targets, float scale, View dlogits, double* losses,
                cudaStream_t stream) {
    const auto blocks = static_cast<unsigned>(ceil_div(logits.cols, kHeld));
    cudaLaunchAttribute cluster{};
    cluster.id = cudaLaunchAttributeClusterDimension;
    cluster.val.clusterDim.x = blocks;
    cluster.val.clusterDim.y = cluster.val.clusterDim.z = 1;
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(static_cast<unsigned>(logits.rows) * blocks);
    config.blockDim = dim3(kHolders);
    config.stream = stream;
    config.attrs = &cluster;
    config.numAttrs = blocks > 1 ? 1 : 0;
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
    if (logits.cols <= kHeld || (logits.cols <= kMostBlocks * kHeld && has_clusters())) {
        start_held(logits, targets, scale, dlogits, losses, stream);
    } else {
        row_kernel<<<blocks_for(logits.rows, 1), kThreads, 0, stream>>>(logits, targets, scale,
                                                                        dlogits, losses);
    }
    sum_kernel<<<1, kThreads, 0, stream>>>(losses, logits.rows, loss_sum);
    check_launch("cross-entropy");
}

void loss_parts(ConstView logits, const int32_t* own_targets, double* parts, cudaStream_t stream) {
    FERRY_CHECK(logits.type == DType::f32 && logits.cols > 0);
    if (logits.rows == 0) return;
    parts_kernel<<<blocks_for(logits.rows, 1), kThreads, 0, stream>>>(logits, own_targets, parts);
    check_launch("parts of the loss");
}

void cross_entropy_of_parts(ConstView logits, const Ops::LossTargets& targets, const double* parts,
                            int ranks, float scale, View dlogits, double* loss_sum, double* losses,
                            cudaStream_t stream) {
    if (logits.rows == 0) return;
    of_parts_kernel<<<blocks_for(logits.rows, 1), kThreads, 0, stream>>>(
        logits, targets, parts, ranks, scale, dlogits, losses);
    sum_kernel<<<1, kThreads, 0, stream>>>(losses, logits.rows, loss_sum);
    check_launch("cross-entropy of parts");
}

}  // namespace ferry::ops::cuda
