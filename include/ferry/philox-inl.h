// Philox4x32-10 (philox() of ferry/base.h), a counter a 64-bit lane: each of its four words in the
// low half of a lane. Included once a target by Highway's foreach_target.h, hence the toggling
// guard.
#if defined(FERRY_PHILOX_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef FERRY_PHILOX_INL_H_
#undef FERRY_PHILOX_INL_H_
#else
#define FERRY_PHILOX_INL_H_
#endif

#include "ferry/base.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace ferry::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

using PhiloxTag = hn::ScalableTag<uint64_t>;
using PhiloxWord = hn::Vec<PhiloxTag>;

struct PhiloxWords {
    PhiloxWord a, b, c, d;
};

// Of the low halves.
HWY_INLINE PhiloxWord philox_product(PhiloxWord word, uint32_t factor) {
    const PhiloxTag wide;
#if HWY_TARGET == HWY_SCALAR
    return hn::Set(wide, (hn::GetLane(word) & 0xffffffffu) * factor);
#else
    const hn::Repartition<uint32_t, PhiloxTag> narrow;
    return hn::MulEven(hn::BitCast(narrow, word), hn::Set(narrow, factor));
#endif
}

// The random bits. High halves are not looked at, and hold anything afterwards.
HWY_INLINE PhiloxWords philox(PhiloxKey key, PhiloxWords w) {
    const PhiloxTag wide;
    uint32_t k0 = key.seed, k1 = static_cast<uint32_t>(key.purpose);
    for (int round = 0; round < 10; ++round) {
        const PhiloxWord a = philox_product(w.a, 0xD2511F53u);
        const PhiloxWord b = philox_product(w.c, 0xCD9E8D57u);
        w = {hn::Xor(hn::Xor(hn::ShiftRight<32>(b), w.b), hn::Set(wide, k0)), b,
             hn::Xor(hn::Xor(hn::ShiftRight<32>(a), w.d), hn::Set(wide, k1)), a};
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    return w;
}

}  // namespace ferry::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
