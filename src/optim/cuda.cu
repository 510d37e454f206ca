// The formulas of ferry/optim.h for the GPU, one thread for one or four elements. The file must be
// compiled without contraction and with exact division and square root (cmake/cuda.cmake):
// tests/unit/cuda_flags_test.py looks at what the compiler made of it.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <string>

#include "internal.h"

namespace ferry::optim::cuda {
namespace {

constexpr int kThreads = 256;  // of a block
constexpr int kLanes = 16;     // of the norm's tree: half a warp

// ---------------------------------------------------------------- formulas

__device__ float flush(float value, float least) { return fabsf(value) < least ? 0.0f : value; }

struct Element {
    float p, m, v;
};

__device__ Element adam_step(Element e, float g, const Scalars& s) {
    e.m = flush(e.m * s.beta1 + g * s.one_minus_beta1, kLeastMoment);
    e.v = flush(e.v * s.beta2 + (g * g) * s.one_minus_beta2, kLeastMoment);
    const float divisor = sqrtf(e.v) * s.inv_sqrt_bias2 + s.eps;
    e.p = e.p * s.decay - (e.m * s.step_size) / divisor;
    return e;
}

__device__ Element sgd_step(Element e, float g, const Scalars& s) {
    e.m = flush(e.m * s.beta1 + g, kLeastMoment);
    const float move = s.nesterov ? g + e.m * s.beta1 : e.m;
    e.p = e.p - move * s.step_size;
    return e;
}

__device__ Element lion_step(Element e, float g, const Scalars& s) {
    const float c = flush(e.m * s.beta1 + g * s.one_minus_beta1, kLeastMoment);
    const float sign = c > 0 ? 1.0f : c < 0 ? -1.0f : c;  // zero, or a NaN that stays one
    e.p = e.p * s.decay - sign * s.step_size;
    e.m = flush(e.m * s.beta2 + g * s.one_minus_beta2, kLeastMoment);
    return e;
}

__device__ Element adagrad_step(Element e, float g, const Scalars& s) {
    e.m = flush(e.m + g * g, kLeastMoment);
    e.p = e.p - (g * s.step_size) / (sqrtf(e.m) + s.eps);
    return e;
}

template <Method kMethod>
__device__ Element step(Element e, float gradient, const Scalars& s) {
    const float g = flush(gradient * s.gradient_scale, kLeastGradient);
    const float decayed = flush(g + e.p * s.weight_decay, kLeastGradient);
    if constexpr (kMethod == Method::adamw) return adam_step(e, g, s);
    if constexpr (kMethod == Method::adam) return adam_step(e, decayed, s);
    if constexpr (kMethod == Method::sgd) return sgd_step(e, decayed, s);
    if constexpr (kMethod == Method::lion) return lion_step(e, g, s);
    if constexpr (kMethod == Method::adagrad) return adagrad_step(e, decayed, s);
}

// ---------------------------------------------------------------- memory

// kCount neighbours, read and written by one access.
template <class T, int kCount>
struct alignas(sizeof(T) * kCount) Pack {
    T at[kCount];
};

template <DType kType>
struct Stored {
    using Type = float;
};
template <>
struct Stored<DType::bf16> {
    using Type = __nv_bfloat16;
};
template <>
struct Stored<DType::f16> {
    using Type = __half;
};

__device__ float widen(float value) { return value; }
__device__ float widen(__nv_bfloat16 value) { return __bfloat162float(value); }
__device__ float widen(__half value) { return __half2float(value); }
__device__ void narrow(float value, float& to) { to = value; }
__device__ void narrow(float value, __nv_bfloat16& to) { to = __float2bfloat16_rn(value); }
__device__ void narrow(float value, __half& to) { to = __float2half_rn(value); }

// The elements [i, i + kCount) of an array of fp32; zeros of an absent one.
template <int kCount>
__device__ Pack<float, kCount> load(const float* array, int64_t i) {
    if (!array) return {};
    return *reinterpret_cast<const Pack<float, kCount>*>(array + i);
}
template <int kCount>
__device__ void store(float* array, int64_t i, const Pack<float, kCount>& values) {
    if (array) *reinterpret_cast<Pack<float, kCount>*>(array + i) = values;
}

template <DType kType, int kCount>
__device__ Pack<float, kCount> load_as_f32(const void* array, int64_t i) {
    using T = typename Stored<kType>::Type;
    const auto raw = *reinterpret_cast<const Pack<T, kCount>*>(static_cast<const T*>(array) + i);
    Pack<float, kCount> values;
    for (int k = 0; k < kCount; ++k) values.at[k] = widen(raw.at[k]);
    return values;
}
template <DType kType, int kCount>
__device__ void store_rounded(void* array, int64_t i, const Pack<float, kCount>& values) {
    if (!array) return;
    using T = typename Stored<kType>::Type;
    Pack<T, kCount> raw;
    for (int k = 0; k < kCount; ++k) narrow(values.at[k], raw.at[k]);
    *reinterpret_cast<Pack<T, kCount>*>(static_cast<T*>(array) + i) = raw;
}

// ---------------------------------------------------------------- kernels

__device__ int64_t thread_index() { return int64_t{blockIdx.x} * kThreads + threadIdx.x; }

// span.count is a multiple of kCount.
template <Method kMethod, DType kGradient, DType kWeight, int kCount>
__global__ void update_kernel(const Span span, const Scalars s) {
    constexpr bool kV = kMethod == Method::adamw || kMethod == Method::adam;
    const int64_t i = thread_index() * kCount;
    if (i >= span.count) return;
    const auto g = load_as_f32<kGradient, kCount>(span.gradient, i);
    auto p = load<kCount>(span.p_in, i), m = load<kCount>(span.m_in, i);
    Pack<float, kCount> v{};
    if constexpr (kV) v = load<kCount>(span.v_in, i);
    for (int k = 0; k < kCount; ++k) {
        const Element e = step<kMethod>({p.at[k], m.at[k], v.at[k]}, g.at[k], s);
        p.at[k] = e.p;
        m.at[k] = e.m;
        v.at[k] = e.v;
    }
    store<kCount>(span.p, i, p);
    store<kCount>(span.m, i, m);
    if constexpr (kV) store<kCount>(span.v, i, v);
    store_rounded<kWeight, kCount>(span.weight, i, p);
}

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

// ---------------------------------------------------------------- launching

void check_launch(const char* kernel) {
    const cudaError_t error = cudaGetLastError();
    if (error == cudaSuccess) return;
    throw Error(
        Trouble::internal,
        {.what = "CUDA did not start the optimizer's kernel",
         .where = kernel,
         .measured = std::string(cudaGetErrorName(error)) + ", " + cudaGetErrorString(error),
         .remedy = "update on the CPU, or build for this GPU (FERRY_CUDA_ARCHITECTURES)"});
}

unsigned blocks_for(int64_t threads) { return static_cast<unsigned>(ceil_div(threads, kThreads)); }

template <DType kType>
struct Constant {
    static constexpr DType kValue = kType;
};

// call(Constant<type>()): a template for a value.
template <class Call>
void with_type(DType type, const Call& call) {
    switch (type) {
        case DType::f32:
            return call(Constant<DType::f32>());
        case DType::bf16:
            return call(Constant<DType::bf16>());
        case DType::f16:
            return call(Constant<DType::f16>());
    }
}

template <Method kMethod, int kCount>
void launch(const Span& span, const Scalars& scalars, cudaStream_t stream) {
    if (span.count == 0) return;
    const unsigned blocks = blocks_for(span.count / kCount);
    with_type(span.gradient_type, [&](auto gradient) {
        with_type(span.weight_type, [&](auto weight) {
            constexpr DType kGradient = decltype(gradient)::kValue;
            constexpr DType kWeight = decltype(weight)::kValue;
            update_kernel<kMethod, kGradient, kWeight, kCount>
                <<<blocks, kThreads, 0, stream>>>(span, scalars);
        });
    });
    check_launch("update");
}

bool aligned(const void* pointer, int64_t bytes) {
    return reinterpret_cast<uintptr_t>(pointer) % static_cast<uintptr_t>(bytes) == 0;
}

// Whether `elements` of them can be moved by one access.
bool aligned(const Span& span, int64_t elements) {
    for (const float* array :
         {span.p_in, span.m_in, span.v_in, static_cast<const float*>(span.p),
          static_cast<const float*>(span.m), static_cast<const float*>(span.v)}) {
        if (!aligned(array, 4 * elements)) return false;
    }
    return aligned(span.gradient, size_of(span.gradient_type) * elements) &&
           aligned(span.weight, size_of(span.weight_type) * elements);
}

template <Method kMethod>
void launch_all(const Span& span, const Scalars& scalars, cudaStream_t stream) {
    constexpr int kTogether = 4;
    const int64_t together = aligned(span, kTogether) ? round_down(span.count, kTogether) : 0;
    launch<kMethod, kTogether>(part_of(span, 0, together), scalars, stream);
    launch<kMethod, 1>(part_of(span, together, span.count - together), scalars, stream);
}

}  // namespace

bool available() {
    int devices = 0;
    cudaFuncAttributes attributes;
    const bool runs = cudaGetDeviceCount(&devices) == cudaSuccess && devices > 0 &&
                      cudaFuncGetAttributes(&attributes, norms_kernel<DType::f32>) == cudaSuccess;
    cudaGetLastError();  // leaves no error behind for who asks next
    return runs;
}

void update(const Span& span, const Scalars& scalars, void* stream) {
    check_span(span, scalars);
    if (span.count == 0) return;
    FERRY_CHECK(aligned(span, 1), "an array is not aligned to its elements");
    auto* on = static_cast<cudaStream_t>(stream);
    switch (scalars.method) {
        case Method::adamw:
            return launch_all<Method::adamw>(span, scalars, on);
        case Method::adam:
            return launch_all<Method::adam>(span, scalars, on);
        case Method::sgd:
            return launch_all<Method::sgd>(span, scalars, on);
        case Method::lion:
            return launch_all<Method::lion>(span, scalars, on);
        case Method::adagrad:
            return launch_all<Method::adagrad>(span, scalars, on);
    }
}

void recast(const float* p, int64_t count, DType weight_type, void* weight, void* stream) {
    FERRY_CHECK(count >= 0 && (count == 0 || (p && weight)));
    const int64_t w_bytes = size_of(weight_type);
    FERRY_CHECK(aligned(p, 4) && aligned(weight, w_bytes));
    constexpr int kTogether = 4;
    const bool may_pack = aligned(p, 4 * kTogether) && aligned(weight, w_bytes * kTogether);
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
