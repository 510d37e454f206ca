// Neighbouring elements of arrays of any type, in and out as fp32: weights, gradients, master
// weights.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "base/cuda_values.h"
#include "optim/internal.h"

namespace ferry::optim::cuda {

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
    for (int k = 0; k < kCount; ++k) values.at[k] = widened(raw.at[k]);
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

// The halves of a split master (ferry/optim.h).
__device__ inline uint32_t exponent_bits(float w) {
    return max(__float_as_uint(w) & kExponent, kLeastExponent);
}
template <DType kWeight>
__device__ float joined(uint16_t weight, uint16_t low) {
    if constexpr (kWeight == DType::f16) {
        const float w = __half2float(__ushort_as_half(weight));
        const float left = static_cast<float>(static_cast<int16_t>(low));
        return w + left * __uint_as_float(exponent_bits(w) - kUnitBelow);
    } else {
        return __uint_as_float(join({weight, low}));
    }
}
template <DType kWeight>
__device__ Halves halves_of(float p) {
    if constexpr (kWeight == DType::f16) {
        const uint16_t cast = __half_as_ushort(__float2half_rn(p));
        const uint16_t half = cast == kMinusZero ? uint16_t{0} : cast;
        const float w = __half2float(__ushort_as_half(half));
        const uint32_t exponent = exponent_bits(w);
        const int left = __float2int_rz((p - w) * __uint_as_float(kScaleSum - exponent));
        return {half, exponent < kExponent ? static_cast<uint16_t>(left) : uint16_t{0}};
    } else {
        return split(__float_as_uint(p));
    }
}

template <bool kSplit, DType kWeight, int kCount>
__device__ Pack<float, kCount> load_master(const Span& span, int64_t i) {
    if constexpr (kSplit) {
        const auto weight = load<kCount>(span.weight_in, i), low = load<kCount>(span.low_in, i);
        Pack<float, kCount> p;
        for (int k = 0; k < kCount; ++k) p.at[k] = joined<kWeight>(weight.at[k], low.at[k]);
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
            const Halves halves = halves_of<kWeight>(p.at[k]);
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

}  // namespace ferry::optim::cuda
