// Rounding of fp32 lanes into arrays of any type and alignment; base/widen-inl.h goes the other
// way. Included once a target by Highway's foreach_target.h, hence the toggling guard.
#if defined(FERRY_OPTIM_CONVERT_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef FERRY_OPTIM_CONVERT_INL_H_
#undef FERRY_OPTIM_CONVERT_INL_H_
#else
#define FERRY_OPTIM_CONVERT_INL_H_
#endif

#include "base/widen-inl.h"
#include "ferry/dtype.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace ferry::optim::HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;
using ferry::HWY_NAMESPACE::above;
using ferry::HWY_NAMESPACE::F;
using ferry::HWY_NAMESPACE::H;
using ferry::HWY_NAMESPACE::I;
using ferry::HWY_NAMESPACE::load_as_f32;
using ferry::HWY_NAMESPACE::load_f16;
using ferry::HWY_NAMESPACE::magnitude_of;
using ferry::HWY_NAMESPACE::U;
using ferry::HWY_NAMESPACE::VF;
using ferry::HWY_NAMESPACE::VU;
using ferry::HWY_NAMESPACE::widen_f16;

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

// One exact instruction where x86 has it, as for the way back (base/widen-inl.h).
#if HWY_TARGET == HWY_AVX2 || HWY_TARGET == HWY_AVX3
using ferry::HWY_NAMESPACE::Half;

HWY_INLINE VF widen_half(hn::Vec<H> half) { return hn::PromoteTo(F(), hn::BitCast(Half(), half)); }
HWY_INLINE hn::Vec<H> narrow_f16(VF value) {
    // One NaN, as everywhere: the instruction would keep a payload.
    const U u;
    const VU sign = hn::And(hn::BitCast(u, value), hn::Set(u, 0x80000000u));
    const VF nan = hn::BitCast(F(), hn::Or(sign, hn::Set(u, 0x7fc00000u)));
    return hn::BitCast(H(), hn::DemoteTo(Half(), hn::IfThenElse(hn::IsNaN(value), nan, value)));
}
#else
HWY_INLINE VF widen_half(hn::Vec<H> half) { return widen_f16(hn::PromoteTo(U(), half)); }
HWY_INLINE hn::Vec<H> narrow_f16(VF value) {
    return hn::DemoteTo(H(), hn::BitCast(I(), round_f16(value)));
}
#endif

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

enum class Side : uint16_t { low, high };
// That half of every lane.
template <Side kSide>
HWY_INLINE hn::Vec<H> halves(VU bits) {
#if HWY_TARGET == HWY_AVX3
    const hn::Repartition<uint16_t, U> d;
    const auto at = hn::Add(hn::Iota(d, static_cast<uint16_t>(kSide)), hn::Iota(d, 0));
    return hn::Vec<H>{_mm512_castsi512_si256(_mm512_permutexvar_epi16(at.raw, bits.raw))};
#else
    if constexpr (kSide == Side::high) return narrow(hn::ShiftRight<16>(bits));
    return narrow(hn::And(bits, hn::Set(U(), 0xffffu)));
#endif
}

// Into the high halves of lanes: bf16 to fp32.
HWY_INLINE VU load_high_halves(const uint16_t* at) {
    const auto halves = hn::LoadU(H(), at);
#if HWY_TARGET == HWY_AVX3
    const VU place = hn::ShiftLeft<16>(hn::Iota(U(), 0));
    return VU{
        _mm512_maskz_permutexvar_epi16(0xaaaaaaaau, place.raw, _mm512_castsi256_si512(halves.raw))};
#else
    return hn::ShiftLeft<16>(hn::PromoteTo(U(), halves));
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
            half = halves<Side::high>(round_bf16(value));
        } else {
            half = narrow_f16(value);
        }
        put_halves<kStream>(half, static_cast<uint16_t*>(array) + i);
    }
}

}  // namespace ferry::optim::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // toggling guard
