// Updates on the GPU of moments that are kept as codes, one warp for one block of 256. Compiled
// without contraction and with exact division and square root (cmake/cuda.cmake).
#include "formulas.h"
#include "launch.h"
#include "memory.h"
#include "optim/moment_map.h"

namespace ferry::optim::cuda {
namespace {

__device__ const MomentMap device_with_sign{true}, device_without_sign{false};

// In shared memory: neighbouring elements have any codes.
struct NearMap {
    float begin[kCodes], rise[kStretches], base[kStretches];
    __device__ void load(const MomentMap& map) {
        static_assert(kThreads == kCodes);
        const unsigned i = threadIdx.x;
        // Nothing comes behind a map's last begin.
        begin[i] = map.begin[i] > 0 ? map.begin[i] : __uint_as_float(0x7f800000u);
        if (i < kStretches) rise[i] = map.rise[i], base[i] = map.base[i];
    }
};

// moment_of() of ferry's CPU (moment_map.cc).
template <bool kSigned>
__device__ float decode(const NearMap& map, uint8_t code, float scale) {
    const int d = kSigned ? int{code} - int{kZeroWithSign} : int{code} + 1;
    const int stretch = (kSigned ? 32 : 31) - __clz(abs(d));
    const float base = map.base[stretch] * scale;
    const float moment = fused(static_cast<float>(kSigned ? 4 * d : d), map.rise[stretch] * scale,
                               d < 0 ? base : -base);
    return !kSigned && code == 0 ? moment + kLeastSquare : moment;
}

// The last distance that begins at the moment's share or before, by halving.
template <bool kSigned>
__device__ uint8_t code_of(const NearMap& map, float moment, float reciprocal) {
    const float x = fused(fabsf(moment), reciprocal, kShareShift);
    int d = 0;
    for (int step = kCodes / 2; step > 0; step /= 2) d += map.begin[d + step] <= x ? step : 0;
    if (!kSigned) return static_cast<uint8_t>(d);
    return static_cast<uint8_t>(kZeroWithSign + (moment < 0 ? -min(d, int{kZeroWithSign}) : d));
}

// A warp has a block: what a moment's codes are stored as. All threads of the warp must come here.
constexpr int kOfThread = static_cast<int>(kMomentBlock) / 32;
struct Encoded {
    uint8_t codes[kOfThread];
    float scale;
};
// The largest over all threads of the warp, in every thread.
__device__ uint32_t largest_of_warp(uint32_t bits) {
#if __CUDA_ARCH__ >= 800
    return __reduce_max_sync(0xffffffffu, bits);
#else
    for (int other = 16; other > 0; other /= 2)
        bits = max(bits, __shfl_xor_sync(0xffffffffu, bits, other));
    return bits;
#endif
}
template <bool kSigned>
__device__ Encoded encode(const NearMap& map, const float (&moments)[kOfThread]) {
    uint32_t bits = 0;
    for (const float moment : moments) bits = max(bits, __float_as_uint(fabsf(moment)));
    bits = largest_of_warp(bits);
    Encoded found;
    const bool finite = bits < 0x7f800000u;  // the bits of NaN and infinity are above all others
    found.scale = finite ? fmaxf(__uint_as_float(bits), kLeastScale) : __uint_as_float(0x7fc00000u);
    const float shrink = found.scale > kLargeScale ? kShrink : 1.0f;
    const float reciprocal = 1 / (found.scale * shrink);
    for (int k = 0; k < kOfThread; ++k)
        found.codes[k] =
            finite ? code_of<kSigned>(map, moments[k] * shrink, reciprocal) : kNotFinite;
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
    if (!span.low) return load_master<false, DType::f32, 1>(span, i).at[0];
    return span.weight_type == DType::f16 ? load_master<true, DType::f16, 1>(span, i).at[0]
                                          : load_master<true, DType::bf16, 1>(span, i).at[0];
}

__device__ void put_master(const Span& span, int64_t i, float p) {
    if (span.low && span.weight_type == DType::f16)
        return store_master<true, DType::f16, 1>(span, i, {{p}});
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
__global__ void __launch_bounds__(kThreads)
    update_coded_kernel(const __grid_constant__ Spans spans, const __grid_constant__ Scalars s) {
    __shared__ NearMap map, map_of_v;
    constexpr bool kSignedM = kMethod != Method::adagrad;
    map.load(kSignedM ? device_with_sign : device_without_sign);
    if constexpr (has_v(kMethod)) map_of_v.load(device_without_sign);
    __syncthreads();
    const int which = span_of_block(spans);
    const Span& span = spans.at[which];
    const int64_t block = thread_of_span(spans, which) / 32;
    const int64_t first = block * kMomentBlock;
    if (first >= span.count) return;  // a whole warp
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const float m_scale = span.m_scale_in[block] * kept_m<kMethod>(s);
    float v_scale = 0;
    if constexpr (has_v(kMethod)) v_scale = span.v_scale_in[block] * s.beta2;
    const auto *m_in = static_cast<const uint8_t*>(span.m_in),
               *v_in = static_cast<const uint8_t*>(span.v_in);
    float m[kOfThread], v[kOfThread];
#pragma unroll
    for (int k = 0; k < kOfThread; ++k) {
        const int64_t i = first + 32 * k + lane;
        m[k] = v[k] = 0;
        if (i >= span.count) continue;
        Element e{master_of(span, i), decode<kSignedM>(map, m_in[i], m_scale), 0};
        if constexpr (has_v(kMethod)) e.v = decode<false>(map_of_v, v_in[i], v_scale);
        e = coded_step<kMethod>(e, widened(span.gradient, span.gradient_type, i), s);
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
    put(encode<kSignedM>(map, m), span.m, span.m_scale);
    if constexpr (has_v(kMethod)) put(encode<false>(map_of_v, v), span.v, span.v_scale);
}

}  // namespace

unsigned coded_blocks(const Span& span) {
    return blocks_for(ceil_div(span.count, kMomentBlock) * 32);
}

void update_coded(const Spans& spans, const Scalars& scalars, cudaStream_t stream) {
    with_method(scalars.method, [&](auto method) {
        update_coded_kernel<decltype(method)::kValue>
            <<<spans.end[spans.count - 1], kThreads, 0, stream>>>(spans, scalars);
    });
    check_launch("update");
}

}  // namespace ferry::optim::cuda
