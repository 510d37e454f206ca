// The formulas of ferry/optim.h for the GPU, one thread for one or four elements. The file must be
// compiled without contraction and with exact division and square root (cmake/cuda.cmake):
// tests/unit/cuda_flags_test.py looks at what the compiler made of it.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <string>

#include "base/random.h"
#include "ferry/device.h"
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

// The elements [i, i + kCount) of an array.
template <int kCount, class T>
__device__ Pack<T, kCount> load(const T* array, int64_t i) {
    return *reinterpret_cast<const Pack<T, kCount>*>(array + i);
}
template <int kCount, class T>
__device__ void store(T* array, int64_t i, const Pack<T, kCount>& values) {
    *reinterpret_cast<Pack<T, kCount>*>(array + i) = values;
}

template <DType kType, int kCount>
__device__ Pack<float, kCount> load_as_f32(const void* array, int64_t i) {
    using T = typename Stored<kType>::Type;
    const auto raw = load<kCount>(static_cast<const T*>(array), i);
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
    store<kCount>(static_cast<T*>(array), i, raw);
}

// ---------------------------------------------------------------- formats

// Philox4x32-10, as ferry::philox.
__device__ void philox_words(const Scalars& s, uint32_t layer, uint32_t block,
                             uint32_t (&words)[4]) {
    uint32_t c0 = s.update, c1 = 0, c2 = layer, c3 = block;
    uint32_t k0 = s.seed, k1 = static_cast<uint32_t>(Purpose::stochastic_rounding);
    for (int round = 0; round < 10; ++round) {
        const uint32_t a = __umulhi(0xD2511F53u, c0), b = __umulhi(0xCD9E8D57u, c2);
        const uint32_t a_low = 0xD2511F53u * c0, b_low = 0xCD9E8D57u * c2;
        c0 = b ^ c1 ^ k0;
        c1 = b_low;
        c2 = a ^ c3 ^ k1;
        c3 = a_low;
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    words[0] = c0, words[1] = c1, words[2] = c2, words[3] = c3;
}

// The random bits of the elements [i, i + kCount): noise_of() of each.
template <int kCount>
__device__ Pack<uint32_t, kCount> draw_noise(const Span& span, const Scalars& s, int64_t i) {
    constexpr int kTogether = kCount == 1 ? 1 : 2;  // neighbours share a block
    Pack<uint32_t, kCount> noise;
    for (int k = 0; k < kCount; k += kTogether) {
        const int64_t e = span.element + i + k;
        uint32_t words[4];
        philox_words(s, span.layer, static_cast<uint32_t>(e / 32 * 8 + e % 16 / 2), words);
        const uint32_t even = e % 32 < 16 ? words[0] : words[2];
        const uint32_t odd = e % 32 < 16 ? words[1] : words[3];
        if constexpr (kCount == 1) {
            noise.at[0] = e % 2 == 0 ? even : odd;
        } else {
            noise.at[k] = even;
            noise.at[k + 1] = odd;
        }
    }
    return noise;
}

// Zeros of an absent moment.
template <int kCount>
__device__ Pack<float, kCount> load_moment(const void* array, DType type, int64_t i) {
    if (!array) return {};
    if (type == DType::f32) return load_as_f32<DType::f32, kCount>(array, i);
    return load_as_f32<DType::bf16, kCount>(array, i);
}

// `noise` has 16 random bits an element, for bf16.
template <int kCount>
__device__ void store_moment(void* array, DType type, int64_t i, const Pack<float, kCount>& values,
                             const Pack<uint32_t, kCount>& noise) {
    if (!array) return;
    if (type == DType::f32) return store<kCount>(static_cast<float*>(array), i, values);
    Pack<uint16_t, kCount> raw;
    for (int k = 0; k < kCount; ++k) {
        const uint32_t bits = __float_as_uint(values.at[k]);
        const bool nan = (bits & 0x7fffffffu) > 0x7f800000u;
        raw.at[k] = static_cast<uint16_t>((nan ? bits | 0x400000u : bits + noise.at[k]) >> 16);
    }
    store<kCount>(static_cast<uint16_t*>(array), i, raw);
}

template <int kCount>
__device__ Pack<float, kCount> load_master(const Span& span, int64_t i) {
    if (!span.low) return load<kCount>(span.p_in, i);
    const auto weight = load<kCount>(span.weight_in, i), low = load<kCount>(span.low_in, i);
    Pack<float, kCount> p;
    for (int k = 0; k < kCount; ++k) p.at[k] = __uint_as_float(join({weight.at[k], low.at[k]}));
    return p;
}

// And the weight.
template <DType kWeight, int kCount>
__device__ void store_master(const Span& span, int64_t i, const Pack<float, kCount>& p) {
    if (!span.low) {
        store<kCount>(span.p, i, p);
        return store_rounded<kWeight, kCount>(span.weight, i, p);
    }
    Pack<uint16_t, kCount> weight, low;
    for (int k = 0; k < kCount; ++k) {
        const Halves halves = split(__float_as_uint(p.at[k]));
        weight.at[k] = halves.weight;
        low.at[k] = halves.low;
    }
    store<kCount>(static_cast<uint16_t*>(span.weight), i, weight);
    store<kCount>(span.low, i, low);
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
    const DType type = span.moment_type;
    auto p = load_master<kCount>(span, i), m = load_moment<kCount>(span.m_in, type, i);
    Pack<float, kCount> v{};
    if constexpr (kV) v = load_moment<kCount>(span.v_in, type, i);
    for (int k = 0; k < kCount; ++k) {
        const Element e = step<kMethod>({p.at[k], m.at[k], v.at[k]}, g.at[k], s);
        p.at[k] = e.p;
        m.at[k] = e.m;
        v.at[k] = e.v;
    }
    store_master<kWeight, kCount>(span, i, p);
    Pack<uint32_t, kCount> of_m{}, of_v{};
    if (type == DType::bf16 && span.m) {
        const auto noise = draw_noise<kCount>(span, s, i);
        for (int k = 0; k < kCount; ++k) {
            of_m.at[k] = noise.at[k] & 0xffffu;
            of_v.at[k] = noise.at[k] >> 16;
        }
    }
    store_moment<kCount>(span.m, type, i, m, of_m);
    if constexpr (kV) store_moment<kCount>(span.v, type, i, v, of_v);
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
    // What failed before this call is Device::check's to name.
    if (error == cudaSuccess || gpu_work_failed()) return;
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
    const int64_t moment = size_of(span.moment_type) * elements;
    const void* const moments[] = {span.m_in, span.m, span.v_in, span.v};
    for (const void* array : moments) {
        if (!aligned(array, moment)) return false;
    }
    const void* const halves[] = {span.weight_in, span.low_in, span.low};
    for (const void* array : halves) {
        if (!aligned(array, 2 * elements)) return false;
    }
    return aligned(span.p_in, 4 * elements) && aligned(span.p, 4 * elements) &&
           aligned(span.gradient, size_of(span.gradient_type) * elements) &&
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
