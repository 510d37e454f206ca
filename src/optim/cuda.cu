// The formulas of ferry/optim.h for the GPU, one thread for one or eight elements. The file must be
// compiled without contraction and with exact division and square root (cmake/cuda.cmake):
// tests/unit/cuda_flags_test.py looks at what the compiler made of it.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <string>

#include "base/random.h"
#include "ferry/device.h"
#include "internal.h"
#include "moment_map.h"

namespace ferry::optim::cuda {
namespace {

constexpr int kThreads = 256;  // of a block
constexpr int kLanes = 16;     // of the norm's tree: half a warp
constexpr int kTogether = 8;   // elements of a thread where all arrays allow it

// ---------------------------------------------------------------- division and square root

// The compiler's exact division and square root branch for every element to code for operands near
// the ends of the range, and so do one element after the other. These are the same operations for
// operands far from the ends, without a branch: those of all elements of a thread run side by side.
// Each ends in a remainder that a fused multiply-add knows exactly, which gives the correctly
// rounded result (Markstein 1990). `safe` becomes false where the operands are not of that range.
__device__ float fused(float a, float b, float c) {
    float sum;
    asm("fma.rn.f32 %0, %1, %2, %3;" : "=f"(sum) : "f"(a), "f"(b), "f"(c));
    return sum;
}

// Whether the bits lie in [least, most], of positive floats.
__device__ bool within(float value, float least, float most) {
    return __float_as_uint(value) - __float_as_uint(least) <=
           __float_as_uint(most) - __float_as_uint(least);
}

// 0 or 2^-100 to 2^100.
__device__ float root(float x, bool& safe) {
    float r;
    asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
    const bool zero = __float_as_uint(x) == 0;
    safe = safe && (zero || within(x, 0x1p-100f, 0x1p100f));
    const float near = x * r;
    const float exact = fused(fused(-near, near, x), r * 0.5f, near);
    return zero ? 0.0f : exact;
}

// a of 0 or 2^-90 to 2^60 in magnitude, b of 2^-60 to 2^30.
__device__ float quotient(float a, float b, bool& safe) {
    float r;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(b));
    const bool fits = __float_as_uint(a) == 0 || within(fabsf(a), 0x1p-90f, 0x1p60f);
    safe = safe && fits && within(b, 0x1p-60f, 0x1p30f);
    r = fused(r, fused(-b, r, 1.0f), r);
    const float near = fused(a, r, 0.0f);
    return fused(r, fused(-b, near, a), near);
}

// Of any operands, by the compiler's.
struct Exact {
    __device__ static float root(float x) { return sqrtf(x); }
    __device__ static float quotient(float a, float b) { return a / b; }
};
// As long as they are safe.
struct Quick {
    bool safe = true;
    __device__ float root(float x) { return cuda::root(x, safe); }
    __device__ float quotient(float a, float b) { return cuda::quotient(a, b, safe); }
};

// ---------------------------------------------------------------- formulas

__device__ float flush(float value, float least) { return fabsf(value) < least ? 0.0f : value; }

struct Element {
    float p, m, v;
};

template <class Math>
__device__ Element adam_step(Element e, float g, const Scalars& s, Math& math) {
    e.m = flush(e.m * s.beta1 + g * s.one_minus_beta1, kLeastMoment);
    e.v = flush(e.v * s.beta2 + (g * g) * s.one_minus_beta2, kLeastMoment);
    const float divisor = math.root(e.v) * s.inv_sqrt_bias2 + s.eps;
    e.p = e.p * s.decay - math.quotient(e.m * s.step_size, divisor);
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

template <class Math>
__device__ Element adagrad_step(Element e, float g, const Scalars& s, Math& math) {
    e.m = flush(e.m + g * g, kLeastMoment);
    e.p = e.p - math.quotient(g * s.step_size, math.root(e.m) + s.eps);
    return e;
}

template <Method kMethod, class Math>
__device__ Element step(Element e, float gradient, const Scalars& s, Math& math) {
    const float g = flush(gradient * s.gradient_scale, kLeastGradient);
    const float decayed = flush(g + e.p * s.weight_decay, kLeastGradient);
    if constexpr (kMethod == Method::adamw) return adam_step(e, g, s, math);
    if constexpr (kMethod == Method::adam) return adam_step(e, decayed, s, math);
    if constexpr (kMethod == Method::sgd) return sgd_step(e, decayed, s);
    if constexpr (kMethod == Method::lion) return lion_step(e, g, s);
    if constexpr (kMethod == Method::adagrad) return adagrad_step(e, decayed, s, math);
}

// ---------------------------------------------------------------- memory

// kCount neighbours, read and written by accesses of at most 16 bytes.
template <class T, int kCount>
struct alignas(sizeof(T) * kCount < 16 ? sizeof(T) * kCount : 16) Pack {
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

// A thread's eight elements are a quarter of a run of 32, and a block of random words serves two
// elements of one half of the run and two of the other: the threads of both halves draw two blocks
// each and exchange what is the other's. All threads of a warp must come here.
__device__ Pack<uint32_t, kTogether> draw_noise(const Span& span, const Scalars& s, int64_t i) {
    static_assert(kTogether == 8);
    const int64_t e = span.element + i;
    const bool upper = e % 32 >= 16;
    uint32_t mine[4], theirs[4];
    for (int k = 0; k < 2; ++k) {
        const int64_t pair = e % 16 / 2 + (upper ? 2 : 0) + k;
        uint32_t words[4];
        philox_words(s, span.layer, static_cast<uint32_t>(e / 32 * 8 + pair), words);
        for (int w = 0; w < 2; ++w) {
            mine[2 * k + w] = upper ? words[2 + w] : words[w];
            theirs[2 * k + w] = upper ? words[w] : words[2 + w];
        }
    }
    Pack<uint32_t, kTogether> noise;
    for (int k = 0; k < 4; ++k) {
        const uint32_t other = __shfl_xor_sync(0xffffffffu, theirs[k], 2);
        noise.at[k] = upper ? other : mine[k];
        noise.at[4 + k] = upper ? mine[k] : other;
    }
    return noise;
}

// The random bits of one element: noise_of() of it.
__device__ uint32_t draw_one(const Span& span, const Scalars& s, int64_t i) {
    const int64_t e = span.element + i;
    uint32_t words[4];
    philox_words(s, span.layer, static_cast<uint32_t>(e / 32 * 8 + e % 16 / 2), words);
    if (e % 32 < 16) return e % 2 == 0 ? words[0] : words[1];
    return e % 2 == 0 ? words[2] : words[3];
}

// Zeros of an absent moment.
template <int kCount>
__device__ Pack<float, kCount> load_moment(const void* array, MomentType type, int64_t i) {
    if (!array) return {};
    if (type == MomentType::f32) return load_as_f32<DType::f32, kCount>(array, i);
    return load_as_f32<DType::bf16, kCount>(array, i);
}

// `noise` has 16 random bits an element from bit `first` on, for bf16.
template <int kCount>
__device__ void store_moment(void* array, MomentType type, int64_t i,
                             const Pack<float, kCount>& values, const Pack<uint32_t, kCount>& noise,
                             int first) {
    if (!array) return;
    if (type == MomentType::f32) return store<kCount>(static_cast<float*>(array), i, values);
    Pack<uint16_t, kCount> raw;
    for (int k = 0; k < kCount; ++k) {
        const uint32_t bits = __float_as_uint(values.at[k]);
        const bool nan = (bits & 0x7fffffffu) > 0x7f800000u;
        const uint32_t random = (noise.at[k] >> first) & 0xffffu;
        raw.at[k] = static_cast<uint16_t>((nan ? bits | 0x400000u : bits + random) >> 16);
    }
    store<kCount>(static_cast<uint16_t*>(array), i, raw);
}

template <bool kSplit, int kCount>
__device__ Pack<float, kCount> load_master(const Span& span, int64_t i) {
    if constexpr (kSplit) {
        const auto weight = load<kCount>(span.weight_in, i), low = load<kCount>(span.low_in, i);
        Pack<float, kCount> p;
        for (int k = 0; k < kCount; ++k) p.at[k] = __uint_as_float(join({weight.at[k], low.at[k]}));
        return p;
    } else {
        return load<kCount>(span.p_in, i);
    }
}

// And the weight.
template <bool kSplit, DType kWeight, int kCount>
__device__ void store_master(const Span& span, int64_t i, const Pack<float, kCount>& p) {
    if constexpr (kSplit) {
        Pack<uint16_t, kCount> weight, low;
        for (int k = 0; k < kCount; ++k) {
            const Halves halves = split(__float_as_uint(p.at[k]));
            weight.at[k] = halves.weight;
            low.at[k] = halves.low;
        }
        store<kCount>(static_cast<uint16_t*>(span.weight), i, weight);
        store<kCount>(span.low, i, low);
    } else {
        store<kCount>(span.p, i, p);
        store_rounded<kWeight, kCount>(span.weight, i, p);
    }
}

// ---------------------------------------------------------------- kernels

__device__ int64_t thread_index() { return int64_t{blockIdx.x} * kThreads + threadIdx.x; }

// What the kernel knows of the state when it is compiled.
template <MomentType kMomentType, bool kIsSplit>
struct Format {
    static constexpr MomentType kMoment = kMomentType;
    static constexpr bool kSplit = kIsSplit;
};

constexpr bool has_v(Method method) { return method == Method::adamw || method == Method::adam; }

// span.count is a multiple of kTogether.
template <Method kMethod, DType kGradient, DType kWeight, class Kept>
__global__ void __launch_bounds__(kThreads, 3) update_kernel(const Span span, const Scalars s) {
    constexpr int kCount = kTogether;
    constexpr MomentType kMoment = Kept::kMoment;
    const int64_t i = thread_index() * kCount;
    Pack<uint32_t, kCount> noise{};
    if constexpr (kMoment == MomentType::bf16) noise = draw_noise(span, s, i);
    if (i >= span.count) return;
    const auto g = load_as_f32<kGradient, kCount>(span.gradient, i);
    const auto was_p = load_master<Kept::kSplit, kCount>(span, i);
    const auto was_m = load_moment<kCount>(span.m_in, kMoment, i);
    Pack<float, kCount> was_v{};
    if constexpr (has_v(kMethod)) was_v = load_moment<kCount>(span.v_in, kMoment, i);
    Pack<float, kCount> p, m, v;
    const auto all = [&](auto& math) {
#pragma unroll
        for (int k = 0; k < kCount; ++k) {
            const Element e =
                step<kMethod>({was_p.at[k], was_m.at[k], was_v.at[k]}, g.at[k], s, math);
            p.at[k] = e.p;
            m.at[k] = e.m;
            v.at[k] = e.v;
        }
    };
    Quick quick;
    all(quick);
    if (!quick.safe) {
        Exact exact;
        all(exact);
    }
    store_master<Kept::kSplit, kWeight, kCount>(span, i, p);
    store_moment<kCount>(span.m, kMoment, i, m, noise, 0);
    if constexpr (has_v(kMethod)) store_moment<kCount>(span.v, kMoment, i, v, noise, 16);
}

// One element a thread, of any alignment and format.
template <Method kMethod, DType kGradient, DType kWeight>
__global__ void update_one_kernel(const Span span, const Scalars s) {
    const int64_t i = thread_index();
    if (i >= span.count) return;
    const MomentType type = span.moment_type;
    const float g = load_as_f32<kGradient, 1>(span.gradient, i).at[0];
    const float p =
        span.low ? load_master<true, 1>(span, i).at[0] : load_master<false, 1>(span, i).at[0];
    Element e{p, load_moment<1>(span.m_in, type, i).at[0], 0};
    if constexpr (has_v(kMethod)) e.v = load_moment<1>(span.v_in, type, i).at[0];
    Exact exact;
    e = step<kMethod>(e, g, s, exact);
    if (span.low) {
        store_master<true, kWeight, 1>(span, i, {{e.p}});
    } else {
        store_master<false, kWeight, 1>(span, i, {{e.p}});
    }
    Pack<uint32_t, 1> noise{};
    if (type == MomentType::bf16 && span.m) noise.at[0] = draw_one(span, s, i);
    store_moment<1>(span.m, type, i, {{e.m}}, noise, 0);
    if constexpr (has_v(kMethod)) store_moment<1>(span.v, type, i, {{e.v}}, noise, 16);
}

// ---------------------------------------------------------------- codes

__device__ const MomentMap device_with_sign{true}, device_without_sign{false};

// In shared memory: neighbouring elements have any codes.
struct NearMap {
    float share[kCodes], begin[kCodes];
    __device__ void load(const MomentMap& map) {
        static_assert(kThreads == kCodes);
        share[threadIdx.x] = map.share[threadIdx.x];
        begin[threadIdx.x] = map.begin[threadIdx.x];
    }
};

// The last code that begins at the share or before, by halving.
__device__ uint8_t code_of(const NearMap& map, float share) {
    int code = 0;
    for (int step = kCodes / 2; step > 0; step /= 2)
        code += map.begin[code + step] <= share ? step : 0;
    return static_cast<uint8_t>(code);
}

// A warp has a block: what a moment's codes are stored as. All threads of the warp must come here.
constexpr int kOfThread = static_cast<int>(kMomentBlock) / 32;
struct Encoded {
    uint8_t codes[kOfThread];
    float scale;
};
// Of all threads of the warp, to all of them.
__device__ uint32_t largest_of_warp(uint32_t bits) {
#if __CUDA_ARCH__ >= 800
    return __reduce_max_sync(0xffffffffu, bits);
#else
    for (int other = 16; other > 0; other /= 2)
        bits = max(bits, __shfl_xor_sync(0xffffffffu, bits, other));
    return bits;
#endif
}
__device__ Encoded encode(const NearMap& map, const float (&moments)[kOfThread]) {
    uint32_t bits = 0;
    for (const float moment : moments) bits = max(bits, __float_as_uint(fabsf(moment)));
    bits = largest_of_warp(bits);
    Encoded found;
    const bool finite = bits < 0x7f800000u;  // of NaN and infinity the bits are above all others'
    found.scale = finite ? fmaxf(__uint_as_float(bits), kLeastScale) : __uint_as_float(0x7fc00000u);
    for (int k = 0; k < kOfThread; ++k)
        found.codes[k] = finite ? code_of(map, moments[k] / found.scale) : kNotFinite;
    return found;
}

__device__ float widened(const void* array, DType type, int64_t i) {
    switch (type) {
        case DType::f32:
            return load_as_f32<DType::f32, 1>(array, i).at[0];
        case DType::bf16:
            return load_as_f32<DType::bf16, 1>(array, i).at[0];
        default:
            return load_as_f32<DType::f16, 1>(array, i).at[0];
    }
}

__device__ float master_of(const Span& span, int64_t i) {
    return span.low ? load_master<true, 1>(span, i).at[0] : load_master<false, 1>(span, i).at[0];
}

__device__ void put_master(const Span& span, int64_t i, float p) {
    if (span.low) return store_master<true, DType::bf16, 1>(span, i, {{p}});
    switch (span.weight_type) {
        case DType::f32:
            return store_master<false, DType::f32, 1>(span, i, {{p}});
        case DType::bf16:
            return store_master<false, DType::bf16, 1>(span, i, {{p}});
        default:
            return store_master<false, DType::f16, 1>(span, i, {{p}});
    }
}

// A warp a block of moments, whose threads take neighbouring elements in turn: of any alignment,
// types and master, and the last block may be shorter.
template <Method kMethod>
__global__ void __launch_bounds__(kThreads) update_coded_kernel(const Span span, const Scalars s) {
    __shared__ NearMap map, map_of_v;
    map.load(kMethod == Method::adagrad ? device_without_sign : device_with_sign);
    if constexpr (has_v(kMethod)) map_of_v.load(device_without_sign);
    __syncthreads();
    const int64_t block = thread_index() / 32;
    const int64_t first = block * kMomentBlock;
    if (first >= span.count) return;  // a whole warp
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const float m_scale = span.m_scale_in[block];
    float v_scale = 0;
    if constexpr (has_v(kMethod)) v_scale = span.v_scale_in[block];
    const auto *m_in = static_cast<const uint8_t*>(span.m_in),
               *v_in = static_cast<const uint8_t*>(span.v_in);
    float m[kOfThread], v[kOfThread];
#pragma unroll
    for (int k = 0; k < kOfThread; ++k) {
        const int64_t i = first + 32 * k + lane;
        m[k] = v[k] = 0;
        if (i >= span.count) continue;
        Element e{master_of(span, i), map.share[m_in[i]] * m_scale, 0};
        if constexpr (has_v(kMethod)) e.v = map_of_v.share[v_in[i]] * v_scale;
        Exact exact;
        e = step<kMethod>(e, widened(span.gradient, span.gradient_type, i), s, exact);
        put_master(span, i, e.p);
        m[k] = e.m, v[k] = e.v;
    }
    const auto put = [&](const Encoded& encoded, void* codes, float* scale) {
        if (lane == 0) scale[block] = encoded.scale;
        for (int k = 0; k < kOfThread; ++k) {
            const int64_t i = first + 32 * k + lane;
            if (i < span.count) static_cast<uint8_t*>(codes)[i] = encoded.codes[k];
        }
    };
    put(encode(map, m), span.m, span.m_scale);
    if constexpr (has_v(kMethod)) put(encode(map_of_v, v), span.v, span.v_scale);
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

// call(Format<...>()). A split master's weights are bf16.
template <class Call>
void with_format(const Span& span, const Call& call) {
    const bool split = is_split(span);
    if (span.moment_type == MomentType::f32) {
        return split ? call(Format<MomentType::f32, true>())
                     : call(Format<MomentType::f32, false>());
    }
    return split ? call(Format<MomentType::bf16, true>()) : call(Format<MomentType::bf16, false>());
}

// call(gradient's Constant, weight's Constant)
template <class Call>
void with_types(const Span& span, const Call& call) {
    with_type(span.gradient_type, [&](auto gradient) {
        with_type(span.weight_type, [&](auto weight) { call(gradient, weight); });
    });
}

template <Method kMethod>
void launch_packs(const Span& span, const Scalars& scalars, cudaStream_t stream) {
    const unsigned blocks = blocks_for(span.count / kTogether);
    with_types(span, [&](auto gradient, auto weight) {
        with_format(span, [&](auto format) {
            constexpr DType kGradient = decltype(gradient)::kValue;
            constexpr DType kWeight = decltype(weight)::kValue;
            using Kept = decltype(format);
            if constexpr (!Kept::kSplit || kWeight == DType::bf16) {
                update_kernel<kMethod, kGradient, kWeight, Kept>
                    <<<blocks, kThreads, 0, stream>>>(span, scalars);
            }
        });
    });
    check_launch("update");
}

template <Method kMethod>
void launch_rest(const Span& span, const Scalars& scalars, cudaStream_t stream) {
    const unsigned blocks = blocks_for(span.count);
    with_types(span, [&](auto gradient, auto weight) {
        update_one_kernel<kMethod, decltype(gradient)::kValue, decltype(weight)::kValue>
            <<<blocks, kThreads, 0, stream>>>(span, scalars);
    });
    check_launch("update");
}

bool aligned(const void* pointer, int64_t bytes) {
    return reinterpret_cast<uintptr_t>(pointer) % static_cast<uintptr_t>(bytes) == 0;
}

// Whether `elements` of each array can be moved by accesses of up to 16 bytes.
bool aligned(const Span& span, int64_t elements) {
    const auto fits = [&](const void* array, int64_t element_bytes) {
        return aligned(array, std::min<int64_t>(16, element_bytes * elements));
    };
    for (const void* array : {span.m_in, static_cast<const void*>(span.m), span.v_in,
                              static_cast<const void*>(span.v)}) {
        if (!fits(array, size_of(span.moment_type))) return false;
    }
    return fits(span.weight_in, 2) && fits(span.low_in, 2) && fits(span.low, 2) &&
           fits(span.p_in, 4) && fits(span.p, 4) &&
           fits(span.gradient, size_of(span.gradient_type)) &&
           fits(span.weight, size_of(span.weight_type));
}

template <Method kMethod>
void launch_coded(const Span& span, const Scalars& scalars, cudaStream_t stream) {
    const unsigned blocks = blocks_for(ceil_div(span.count, kMomentBlock) * 32);
    update_coded_kernel<kMethod><<<blocks, kThreads, 0, stream>>>(span, scalars);
    check_launch("update");
}

template <Method kMethod>
void launch_all(const Span& span, const Scalars& scalars, cudaStream_t stream) {
    if (is_coded(span)) return launch_coded<kMethod>(span, scalars, stream);
    // Whole runs: the threads of a run draw its random bits together.
    const int64_t packs = aligned(span, kTogether) ? round_down(span.count, kNoiseRun) : 0;
    if (packs > 0) launch_packs<kMethod>(part_of(span, 0, packs), scalars, stream);
    if (packs < span.count)
        launch_rest<kMethod>(part_of(span, packs, span.count - packs), scalars, stream);
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
