// Exact conversions between fp32 lanes and arrays of any type and alignment. Included once a target
// by Highway's foreach_target.h, hence the toggling guard.
#if defined(FERRY_OPTIM_CONVERT_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef FERRY_OPTIM_CONVERT_INL_H_
#undef FERRY_OPTIM_CONVERT_INL_H_
#else
#define FERRY_OPTIM_CONVERT_INL_H_
#endif

#include "ferry/dtype.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace ferry::optim::HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;
using F = hn::CappedTag<float, 16>;  // the norm's tree has 16 lanes
using U = hn::RebindToUnsigned<F>;
using I = hn::RebindToSigned<F>;
using H = hn::Rebind<uint16_t, F>;  // as many 16-bit lanes as F has
using VF = hn::Vec<F>;
using VU = hn::Vec<U>;

HWY_INLINE VU magnitude_of(VU bits) { return hn::And(bits, hn::Set(U(), 0x7fffffffu)); }

// For values below 2^31: signed comparison is one instruction everywhere, unsigned is not.
HWY_INLINE hn::Mask<U> above(VU value, uint32_t limit) {
    const I i;
    return hn::RebindMask(U(),
                          hn::Gt(hn::BitCast(i, value), hn::Set(i, static_cast<int32_t>(limit))));
}

HWY_INLINE VF widen_bf16(VU bits) { return hn::BitCast(F(), hn::ShiftLeft<16>(bits)); }

// By integers: Highway 1.0.3 is wrong below AVX2, and some units flush fp16 denormals.
HWY_INLINE VF widen_f16(VU bits) {
    const U u;
    const F f;
    const VU magnitude = hn::And(bits, hn::Set(u, 0x7fffu));
    const VU rebias = hn::Set(u, 112u << 23);
    VU wide = hn::Add(hn::ShiftLeft<13>(magnitude), rebias);
    // Infinity and NaN keep the largest exponent.
    wide = hn::Add(wide, hn::IfThenElseZero(above(magnitude, 0x7bffu), rebias));
    const VF tiny = hn::Mul(hn::ConvertTo(f, hn::BitCast(I(), magnitude)), hn::Set(f, 0x1p-24f));
    wide = hn::IfThenElse(above(magnitude, 0x3ffu), wide, hn::BitCast(u, tiny));
    return hn::BitCast(f, hn::Or(wide, hn::ShiftLeft<16>(hn::Xor(bits, magnitude))));
}

// To nearest, ties to even, in the high half of a lane; a NaN stays one (the carry could turn it
// into an infinity).
HWY_INLINE VU round_bf16(VF value) {
    const U u;
    const VU bits = hn::BitCast(u, value);
    const auto odd = hn::TestBit(bits, hn::Set(u, 0x10000u));
    const VU rounded = hn::Add(bits, hn::IfThenElse(odd, hn::Set(u, 0x8000u), hn::Set(u, 0x7fffu)));
    const VU quiet = hn::Or(bits, hn::Set(u, 0x400000u));
    const auto nan = hn::RebindMask(u, hn::IsNaN(value));
    return hn::IfThenElse(nan, quiet, rounded);
}

HWY_INLINE VU round_f16(VF value) {
    const U u;
    const F f;
    const VU bits = hn::BitCast(u, value);
    const VU magnitude = magnitude_of(bits);
    const VU odd = hn::And(hn::ShiftRight<13>(magnitude), hn::Set(u, 1u));
    const VU rounded = hn::Add(hn::Add(magnitude, hn::Set(u, 0xfffu)), odd);
    VU half = hn::ShiftRight<13>(hn::Sub(rounded, hn::Set(u, 0x38000000u)));
    // Below 2^-14 the spacing is 2^-24, that of floats near 1/2: one addition rounds.
    const VF shifted = hn::Add(hn::BitCast(f, magnitude), hn::Set(f, 0.5f));
    const VU tiny = hn::Sub(hn::BitCast(u, shifted), hn::Set(u, 0x3f000000u));
    half = hn::IfThenElse(above(magnitude, 0x387fffffu), half, tiny);
    // 65520 and above round to infinity.
    half = hn::IfThenElse(above(magnitude, 0x477fefffu), hn::Set(u, 0x7c00u), half);
    half = hn::IfThenElse(above(magnitude, 0x7f800000u), hn::Set(u, 0x7e00u), half);
    return hn::Or(half, hn::And(hn::ShiftRight<16>(bits), hn::Set(u, 0x8000u)));
}

// From AVX2 on x86 converts by one exact instruction, whatever MXCSR says about denormals.
#if HWY_TARGET == HWY_AVX2 || HWY_TARGET == HWY_AVX3
using Half = hn::Rebind<hwy::float16_t, F>;

HWY_INLINE VF load_f16(const uint16_t* at) {
    return hn::PromoteTo(F(), hn::LoadU(Half(), reinterpret_cast<const hwy::float16_t*>(at)));
}
HWY_INLINE VF widen_half(hn::Vec<H> half) { return hn::PromoteTo(F(), hn::BitCast(Half(), half)); }
HWY_INLINE hn::Vec<H> narrow_f16(VF value) {
    // One NaN, as everywhere: the instruction would keep a payload.
    const U u;
    const VU sign = hn::And(hn::BitCast(u, value), hn::Set(u, 0x80000000u));
    const VF nan = hn::BitCast(F(), hn::Or(sign, hn::Set(u, 0x7fc00000u)));
    return hn::BitCast(H(), hn::DemoteTo(Half(), hn::IfThenElse(hn::IsNaN(value), nan, value)));
}
#else
HWY_INLINE VF load_f16(const uint16_t* at) {
    return widen_f16(hn::PromoteTo(U(), hn::LoadU(H(), at)));
}
HWY_INLINE VF widen_half(hn::Vec<H> half) { return widen_f16(hn::PromoteTo(U(), half)); }
HWY_INLINE hn::Vec<H> narrow_f16(VF value) {
    return hn::DemoteTo(H(), hn::BitCast(I(), round_f16(value)));
}
#endif

template <DType kType>
HWY_INLINE VF load_as_f32(const void* array, int64_t i) {
    if constexpr (kType == DType::f32) {
        return hn::LoadU(F(), static_cast<const float*>(array) + i);
    } else if constexpr (kType == DType::bf16) {
        const auto half = hn::LoadU(H(), static_cast<const uint16_t*>(array) + i);
        return widen_bf16(hn::PromoteTo(U(), half));
    } else {
        return load_f16(static_cast<const uint16_t*>(array) + i);
    }
}

template <bool kStream, class D, class V, class T>
HWY_INLINE void put(V value, D d, T* at) {
    if constexpr (kStream) {
        hn::Stream(value, d, at);
    } else {
        hn::StoreU(value, d, at);
    }
}

// For values below 2^16.
HWY_INLINE hn::Vec<H> narrow(VU bits) { return hn::DemoteTo(H(), hn::BitCast(I(), bits)); }

HWY_INLINE hn::Vec<H> high_halves(VU bits) {
#if HWY_TARGET == HWY_AVX3
    const auto odd = hn::Add(hn::Iota(hn::Repartition<uint16_t, U>(), 1),
                             hn::Iota(hn::Repartition<uint16_t, U>(), 0));
    return hn::Vec<H>{_mm512_castsi512_si256(_mm512_permutexvar_epi16(odd.raw, bits.raw))};
#else
    return narrow(hn::ShiftRight<16>(bits));
#endif
}

template <bool kStream>
HWY_INLINE void put_halves(hn::Vec<H> halves, uint16_t* at) {
    constexpr bool kCan = HWY_MAX_BYTES >= 32;  // half of a 128-bit vector has no streaming store
    put<kStream && kCan>(halves, H(), at);
}

template <DType kType, bool kStream>
HWY_INLINE void store_rounded(VF value, void* array, int64_t i) {
    if constexpr (kType == DType::f32) {
        put<kStream>(value, F(), static_cast<float*>(array) + i);
    } else {
        hn::Vec<H> half;
        if constexpr (kType == DType::bf16) {
            half = high_halves(round_bf16(value));
        } else {
            half = narrow_f16(value);
        }
        put_halves<kStream>(half, static_cast<uint16_t*>(array) + i);
    }
}

}  // namespace ferry::optim::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // toggling guard
