// Exact widening of arrays of any type and alignment to fp32 lanes. Included once a target by
// Highway's foreach_target.h, hence the toggling guard.
#if defined(FERRY_WIDEN_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef FERRY_WIDEN_INL_H_
#undef FERRY_WIDEN_INL_H_
#else
#define FERRY_WIDEN_INL_H_
#endif

#include "ferry/dtype.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace ferry::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

using F = hn::CappedTag<float, 16>;  // the tree of a norm's sums has 16
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

// From AVX2 on x86 converts by one exact instruction, whatever MXCSR says about denormals.
#if HWY_TARGET == HWY_AVX2 || HWY_TARGET == HWY_AVX3
using Half = hn::Rebind<hwy::float16_t, F>;

HWY_INLINE VF load_f16(const uint16_t* at) {
    return hn::PromoteTo(F(), hn::LoadU(Half(), reinterpret_cast<const hwy::float16_t*>(at)));
}
#else
HWY_INLINE VF load_f16(const uint16_t* at) {
    return widen_f16(hn::PromoteTo(U(), hn::LoadU(H(), at)));
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

}  // namespace ferry::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // toggling guard
