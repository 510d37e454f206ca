// Philox4x32-10 (philox() of base/random.h) on vectors. Four vectors of 64-bit lanes hold the four
// words of a counter for each lane, each word in the low half of its lane. Highway's
// foreach_target.h includes this file once for each target, hence the toggling guard.
#if defined(FERRY_PHILOX_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef FERRY_PHILOX_INL_H_
#undef FERRY_PHILOX_INL_H_
#else
#define FERRY_PHILOX_INL_H_
#endif

#include "base/random.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace ferry::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

using PhiloxTag = hn::ScalableTag<uint64_t>;
using PhiloxWord = hn::Vec<PhiloxTag>;

// The product of the low halves.
HWY_INLINE PhiloxWord philox_product(PhiloxWord word, uint32_t factor) {
#if HWY_TARGET == HWY_SCALAR
    return hn::Set(PhiloxTag(), (hn::GetLane(word) & 0xffffffffu) * factor);
#else
    const hn::Repartition<uint32_t, PhiloxTag> narrow;
    return hn::MulEven(hn::BitCast(narrow, word), hn::Set(narrow, factor));
#endif
}

// A counter's words become its random bits. High halves are not looked at, and hold anything
// afterwards. By reference: SVE's vectors cannot be members.
HWY_INLINE void philox(PhiloxKey key, PhiloxWord& w0, PhiloxWord& w1, PhiloxWord& w2,
                       PhiloxWord& w3) {
    const PhiloxTag wide;
    uint32_t k0 = key.seed, k1 = static_cast<uint32_t>(key.purpose);
    for (int round = 0; round < 10; ++round) {
        const PhiloxWord a = philox_product(w0, 0xD2511F53u);
        const PhiloxWord b = philox_product(w2, 0xCD9E8D57u);
        w0 = hn::Xor(hn::Xor(hn::ShiftRight<32>(b), w1), hn::Set(wide, k0));
        w2 = hn::Xor(hn::Xor(hn::ShiftRight<32>(a), w3), hn::Set(wide, k1));
        w1 = b;
        w3 = a;
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
}

}  // namespace ferry::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
