// Blocks of int8 moments: their codes to fp32 and back. Included once a target by Highway's
// foreach_target.h, hence the toggling guard.
#if defined(FERRY_OPTIM_CODES_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef FERRY_OPTIM_CODES_INL_H_
#undef FERRY_OPTIM_CODES_INL_H_
#else
#define FERRY_OPTIM_CODES_INL_H_
#endif

#include <algorithm>
#include <bit>
#include <cstring>
#include <limits>

#include "convert-inl.h"
#include "moment_cells.h"
#include "moment_lines.h"
#include "moment_map.h"

HWY_BEFORE_NAMESPACE();
namespace ferry::optim::HWY_NAMESPACE {

// A block's moments in fp32 before they are encoded: in the first cache.
struct BlockMoments {
    HWY_ALIGN float value[kMomentBlock];
    float largest = 0;  // magnitude
};

#if HWY_TARGET == HWY_AVX3

// One register looked up by the low bits of each lane.
HWY_INLINE VF lookup(const float (&table)[16], VU index) {
    return VF{_mm512_permutexvar_ps(index.raw, _mm512_load_ps(table))};
}

// A block's codes to moments, its scale worked into the tables.
template <bool kSigned>
class Decoder {
public:
    HWY_INLINE explicit Decoder(float scale) {
        const F f;
        const VF s = hn::Set(f, scale);
        rise_ = hn::Mul(hn::Load(f, kLines.rise), s);
        base_ = hn::MulSub(hn::Load(f, kLines.base), s, hn::Load(f, kLines.rest));
    }

    // The sixteen moments of the codes from `at` on.
    HWY_INLINE VF operator()(const uint8_t* at) const {
        const F f;
        // A code as the last byte of a float whose last bit is a place's step.
        constexpr int32_t kWhole = kSigned ? 0x4c000000 : 0x4b000000;  // 2^25, 2^23
        const float less = kSigned ? 0x1p25f + 4 * kZeroWithSign : 0x1p23f - 1;
        const __m512i bytes =
            _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(at)));
        const __m512i order =
            _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
        const __m512i whole =
            _mm512_mask_shuffle_epi8(_mm512_set1_epi32(kWhole), 0x1111111111111111u, bytes, order);
        const VF place = hn::Sub(VF{_mm512_castsi512_ps(whole)}, hn::Set(f, less));
        const VU stretch = hn::ShiftRight<23>(hn::BitCast(U(), place));
        const VF rise{_mm512_permutexvar_ps(stretch.raw, rise_.raw)};
        VF base{_mm512_permutexvar_ps(stretch.raw, base_.raw)};
        if constexpr (kSigned) base = hn::CopySign(base, place);
        return hn::MulSub(place, rise, base);
    }

private:
    static constexpr const MomentLines<kSigned>& kLines = kMomentLines<kSigned>;
    VF rise_, base_;
};

// The codes of sixteen moments as integers, less that of zero.
template <bool kSigned>
HWY_INLINE __m512i encode(VF moment, VF reciprocal) {
    constexpr const MomentLines<kSigned>& lines = kMomentLines<kSigned>;
    const F f;
    const VF x =
        hn::MulAdd(kSigned ? hn::Abs(moment) : moment, reciprocal, hn::Set(f, kShareShift));
    const VF border = lookup(lines.border, hn::ShiftRight<24>(hn::BitCast(U(), x)));
    const __mmask16 next = _mm512_cmp_ps_mask(x.raw, border.raw, _CMP_GE_OQ);
    const __m512i before = _mm512_castps_si512(border.raw);
    const VU stretch{_mm512_mask_add_epi32(before, next, before, _mm512_set1_epi32(1))};
    const VF line = hn::MulAdd(x, lookup(lines.slope, stretch), lookup(lines.offset, stretch));
    VF distance = hn::Min(line, lookup(lines.last, stretch));
    if constexpr (kSigned) distance = hn::CopySignToAbs(distance, moment);
    return _mm512_cvttps_epi32(distance.raw);
}

// Of finite moments, whose scale has this reciprocal.
template <bool kSigned>
HWY_INLINE void encode_finite(const BlockMoments& block, float reciprocal, uint8_t* codes) {
    const F f;
    const VF r = hn::Set(f, reciprocal);
    const __m512i zero = _mm512_set1_epi16(kZeroWithSign);
    // Packing works in quarters of a vector: this is their order.
    const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    for (int64_t i = 0; i < kMomentBlock; i += 64) {
        __m512i code[4];
        for (int64_t j = 0; j < 4; ++j)
            code[j] = encode<kSigned>(hn::Load(f, block.value + i + 16 * j), r);
        __m512i low = _mm512_packs_epi32(code[0], code[1]);
        __m512i high = _mm512_packs_epi32(code[2], code[3]);
        if constexpr (kSigned)
            low = _mm512_add_epi16(low, zero), high = _mm512_add_epi16(high, zero);
        const __m512i bytes = _mm512_permutexvar_epi32(order, _mm512_packus_epi16(low, high));
        _mm512_storeu_si512(codes + i, bytes);
    }
}

#else

using Codes = hn::Rebind<uint8_t, F>;

// A block's codes to moments, its scale worked into the tables.
template <bool kSigned>
class Decoder {
public:
    HWY_INLINE explicit Decoder(float scale) {
        const F f;
        const VF s = hn::Set(f, scale);
        for (size_t i = 0; i < 16; i += hn::Lanes(f)) {
            const VF rest = hn::Load(f, kLines.rest + i);
            hn::Store(hn::Mul(hn::Load(f, kLines.rise + i), s), f, rise_ + i);
            hn::Store(hn::MulSub(hn::Load(f, kLines.base + i), s, rest), f, base_ + i);
        }
    }

    // The moments of the codes from `at` on.
    HWY_INLINE VF operator()(const uint8_t* at) const {
        const F f;
        const I i;
        auto code = hn::PromoteTo(i, hn::LoadU(Codes(), at));
        if constexpr (kSigned) {
            code = hn::ShiftLeft<2>(hn::Sub(code, hn::Set(i, kZeroWithSign)));
        } else {
            code = hn::Add(code, hn::Set(i, 1));
        }
        const VF place = hn::ConvertTo(f, code);
        const auto stretch =
            hn::And(hn::ShiftRight<23>(hn::BitCast(i, place)), hn::Set(i, int32_t{15}));
        VF base = hn::GatherIndex(f, base_, stretch);
        if constexpr (kSigned) base = hn::CopySign(base, place);
        return hn::MulSub(place, hn::GatherIndex(f, rise_, stretch), base);
    }

private:
    static constexpr const MomentLines<kSigned>& kLines = kMomentLines<kSigned>;
    HWY_ALIGN float rise_[16];
    HWY_ALIGN float base_[16];
};

template <bool kSigned>
HWY_INLINE void encode(VF moment, VF reciprocal, const int32_t* words, uint8_t* at) {
    using Cells = MomentCells<kSigned>;
    const F f;
    const I i;
    const VF x = hn::MulAdd(hn::Abs(moment), reciprocal, hn::Set(f, kShareShift));
    const auto offset = hn::Sub(hn::BitCast(i, x), hn::Set(i, Cells::kLeast));
    const auto last = hn::And(offset, hn::Set(i, (1 << Cells::kLastBits) - 1));
    const auto word = hn::GatherIndex(i, words, hn::ShiftRight<Cells::kLastBits>(offset));
    const auto begin = hn::And(word, hn::Set(i, (1 << Cells::kAtBits) - 1));
    // One more where `last` has reached the begin.
    const auto before = hn::VecFromMask(i, hn::Gt(begin, last));  // all ones where it has not
    auto code = hn::Add(hn::ShiftRight<Cells::kAtBits>(word), hn::Add(before, hn::Set(i, 1)));
    if constexpr (kSigned) {
        const auto sign = hn::BroadcastSignBit(hn::BitCast(i, moment));  // all ones below zero
        code = hn::Add(hn::Sub(hn::Xor(code, sign), sign), hn::Set(i, kZeroWithSign));
    }
    hn::StoreU(hn::DemoteTo(Codes(), code), Codes(), at);
}

// Of finite moments, whose scale has this reciprocal.
template <bool kSigned>
HWY_INLINE void encode_finite(const BlockMoments& block, float reciprocal, uint8_t* codes) {
    const int32_t* words = nullptr;
    if constexpr (kSigned) {
        words = cells_with_sign().word;
    } else {
        words = cells_without_sign().word;
    }
    const VF r = hn::Set(F(), reciprocal);
    const auto lanes = static_cast<int64_t>(hn::Lanes(F()));
    for (int64_t i = 0; i < kMomentBlock; i += lanes)
        encode<kSigned>(hn::Load(F(), block.value + i), r, words, codes + i);
}

#endif

// What orders moments by magnitude. Those of the map without signs are above zero, and AVX-512
// leaves it to encode_all to see that they are.
template <bool kSigned>
HWY_INLINE VU order_of(VF moment) {
    const VU bits = hn::BitCast(U(), moment);
    return kSigned || HWY_TARGET != HWY_AVX3 ? magnitude_of(bits) : bits;
}

// Compares the bits as integers, in which infinities and NaNs are above all others.
HWY_INLINE float largest_of(VU magnitudes) {
    HWY_ALIGN uint32_t lanes[16] = {};
    hn::Store(magnitudes, U(), lanes);
    return std::bit_cast<float>(*std::max_element(lanes, lanes + 16));
}

// Makes a block's moments magnitudes, of which the largest comes back.
HWY_INLINE float without_signs(BlockMoments& block) {
    uint32_t largest = 0;
    for (float& value : block.value) {
        const uint32_t bits = std::bit_cast<uint32_t>(value) & 0x7fffffffu;
        value = std::bit_cast<float>(bits);
        largest = std::max(largest, bits);
    }
    return std::bit_cast<float>(largest);
}

// Encodes a whole moment block: its scale, and its codes. One copy a target and map, not one a
// loop.
template <bool kSigned>
HWY_NOINLINE void encode_all(BlockMoments& block, uint8_t* codes, float* scale) {
    float largest = block.largest;
    if (HWY_UNLIKELY((std::bit_cast<uint32_t>(largest) >> 31) != 0)) largest = without_signs(block);
    if (!(largest <= std::numeric_limits<float>::max())) {
        *scale = std::numeric_limits<float>::quiet_NaN();
        std::memset(codes, kNotFinite, kMomentBlock);
        return;
    }
    const float s = *scale = std::max(largest, kLeastScale);
    if (HWY_LIKELY(s <= kLargeScale)) return encode_finite<kSigned>(block, 1 / s, codes);
    for (float& value : block.value) value *= kShrink;
    encode_finite<kSigned>(block, 1 / (s * kShrink), codes);
}

}  // namespace ferry::optim::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // toggling guard
