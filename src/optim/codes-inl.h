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

// A block's moments in fp32, between decoding and encoding: in the first cache.
struct BlockMoments {
    HWY_ALIGN float value[kMomentBlock];
    float scale_in = 0;
    float largest = 0;  // magnitude
};

#if HWY_TARGET == HWY_AVX3

// One register looked up by the low bits of each lane.
HWY_INLINE VF lookup(const float (&table)[16], VU index) {
    return VF{_mm512_permutexvar_ps(index.raw, _mm512_load_ps(table))};
}

// The sixteen moments of the codes from `at` on.
template <bool kSigned>
HWY_INLINE VF decode(const uint8_t* at, float scale) {
    constexpr const MomentLines<kSigned>& lines = kMomentLines<kSigned>;
    const F f;
    const U u;
    const auto code = hn::PromoteTo(I(), hn::LoadU(hn::Rebind<uint8_t, F>(), at));
    const VF distance = hn::ConvertTo(f, hn::Sub(code, hn::Set(I(), lines.kZero)));
    const VF magnitude = kSigned ? hn::Abs(distance) : distance;
    const VU place = hn::BitCast(u, hn::Add(magnitude, hn::Set(f, lines.kShift)));
    const VU stretch = hn::ShiftRight<23>(place);
    const __m512i one = _mm512_set1_epi32(0x3f800000), mantissa = _mm512_set1_epi32(0x7fffff);
    const VF t{_mm512_castsi512_ps(_mm512_ternarylogic_epi32(place.raw, mantissa, one, 0xea))};
    const VF w = hn::MulSub(t, hn::Set(f, 9.0f), hn::Set(f, 8.0f));
    VF share =
        hn::MulAdd(w, lookup(lines.unit, stretch), hn::Mul(w, lookup(lines.unit_rest, stretch)));
    if constexpr (kSigned) share = hn::CopySignToAbs(share, distance);
    return hn::Mul(share, hn::Set(f, scale));
}

// The codes of sixteen moments as integers, and which of them are in doubt.
template <bool kSigned>
HWY_INLINE __m512i encode(VF moment, VF reciprocal, __mmask16& doubt) {
    constexpr const MomentLines<kSigned>& lines = kMomentLines<kSigned>;
    const VF share = hn::Mul(moment, reciprocal);
    // The larger magnitude, without a sign.
    const VF x{_mm512_range_ps(share.raw, _mm512_set1_ps(kLeastShare), 0b1011)};
    const __m512i exponent = _mm512_srli_epi32(_mm512_castps_si512(x.raw), 23);
    const __m512 border = _mm512_permutex2var_ps(_mm512_load_ps(lines.border), exponent,
                                                 _mm512_load_ps(lines.border + 16));
    const __mmask16 next = _mm512_cmp_ps_mask(x.raw, border, _CMP_GE_OQ);
    __m512i index = _mm512_castps_si512(border);
    index = _mm512_mask_add_epi32(index, next, index, _mm512_set1_epi32(1));
    const VU stretch{index};
    const VF t = hn::MulAdd(x, lookup(lines.slope, stretch), lookup(lines.offset, stretch));
    const __m512 beyond = _mm512_reduce_ps(t.raw, _MM_FROUND_TO_NEG_INF);
    doubt = _mm512_cmp_ps_mask(beyond, _mm512_set1_ps(2 * kDoubt), _CMP_LT_OQ);
    VF distance = hn::Min(t, lookup(lines.last, stretch));
    if constexpr (kSigned) distance = hn::CopySignToAbs(distance, moment);
    const __m512i code = _mm512_cvttps_epi32(distance.raw);
    return kSigned ? _mm512_add_epi32(code, _mm512_set1_epi32(lines.kZero)) : code;
}

// The code by the definition, from one that is at most one off.
template <bool kSigned>
HWY_INLINE uint8_t exact_code(float share, uint8_t code) {
    const float* begin = MomentLines<kSigned>::kMap.begin;
    if (code > 0 && share < begin[code]) return static_cast<uint8_t>(code - 1);
    if (code < kCodes - 1 && share >= begin[code + 1]) return static_cast<uint8_t>(code + 1);
    return code;
}

template <bool kSigned>
HWY_INLINE void encode_finite(BlockMoments& block, float scale, uint8_t* codes) {
    const F f;
    if (scale > 0x1p100f) {  // whose reciprocal is hardly a float
        scale *= 0x1p-40f;
        for (float& value : block.value) value *= 0x1p-40f;
    }
    const VF reciprocal = hn::Set(f, 1 / scale);
    // Packing works in quarters of a vector: this is their order.
    const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    for (int64_t i = 0; i < kMomentBlock; i += 64) {
        __m512i code[4];
        __mmask16 doubt[4];
        for (int64_t j = 0; j < 4; ++j)
            code[j] = encode<kSigned>(hn::Load(f, block.value + i + 16 * j), reciprocal, doubt[j]);
        const __m512i low = _mm512_packs_epi32(code[0], code[1]);
        const __m512i high = _mm512_packs_epi32(code[2], code[3]);
        const __m512i bytes = _mm512_permutexvar_epi32(order, _mm512_packus_epi16(low, high));
        _mm512_storeu_si512(codes + i, bytes);
        uint64_t left = uint64_t{doubt[3]} << 48 | uint64_t{doubt[2]} << 32 |
                        uint64_t{doubt[1]} << 16 | doubt[0];
        for (; HWY_UNLIKELY(left != 0); left &= left - 1) {
            const int64_t at = i + std::countr_zero(left);
            codes[at] = exact_code<kSigned>(block.value[at] / scale, codes[at]);
        }
    }
}

#else

using Codes = hn::Rebind<uint8_t, F>;

// The moments of the codes from `at` on.
template <bool kSigned>
HWY_INLINE VF decode(const uint8_t* at, float scale) {
    constexpr const MomentMap& map = kSigned ? kWithSign : kWithoutSign;
    const auto code = hn::PromoteTo(I(), hn::LoadU(Codes(), at));
    return hn::Mul(hn::GatherIndex(F(), map.share, code), hn::Set(F(), scale));
}

template <bool kSigned>
HWY_INLINE void encode(VF moment, VF scale, const int32_t* words, uint8_t* at) {
    using Cells = MomentCells<kSigned>;
    const I i;
    const auto bits = hn::BitCast(i, hn::Div(moment, scale));
    const auto least = hn::Set(i, Cells::kLeast);
    const auto magnitude = hn::Max(hn::And(bits, hn::Set(i, 0x7fffffff)), least);
    const auto offset = hn::Sub(magnitude, least);
    auto cell = hn::ShiftRight<Cells::kLastBits>(offset);
    const auto last = hn::And(offset, hn::Set(i, (1 << Cells::kLastBits) - 1));
    const auto sign = hn::BroadcastSignBit(bits);  // all ones below zero
    if constexpr (kSigned) cell = hn::Add(cell, hn::And(sign, hn::Set(i, Cells::kOfSign)));
    const auto word = hn::GatherIndex(i, words, cell);
    const auto begin = hn::And(word, hn::Set(i, (1 << Cells::kAtBits) - 1));
    const auto code = hn::ShiftRight<Cells::kAtBits>(word);
    // One more where `last` has reached the begin; one less below zero.
    const auto next = hn::VecFromMask(i, hn::Gt(begin, last));  // all ones where it has not
    auto step = hn::Add(next, hn::Set(i, 1));
    if constexpr (kSigned) step = hn::Sub(hn::Xor(step, sign), sign);
    hn::StoreU(hn::DemoteTo(Codes(), hn::Add(code, step)), Codes(), at);
}

template <bool kSigned>
HWY_INLINE void encode_finite(const BlockMoments& block, float scale, uint8_t* codes) {
    const int32_t* words = nullptr;
    if constexpr (kSigned) {
        words = cells_with_sign().word;
    } else {
        words = cells_without_sign().word;
    }
    const VF s = hn::Set(F(), scale);
    const auto lanes = static_cast<int64_t>(hn::Lanes(F()));
    for (int64_t i = 0; i < kMomentBlock; i += lanes)
        encode<kSigned>(hn::Load(F(), block.value + i), s, words, codes + i);
}

#endif

// Compares the bits as integers, in which infinities and NaNs are above all others.
HWY_INLINE float largest_of(VU magnitudes) {
    HWY_ALIGN uint32_t lanes[16] = {};
    hn::Store(magnitudes, U(), lanes);
    return std::bit_cast<float>(*std::max_element(lanes, lanes + 16));
}

// Encodes a whole moment block: its scale, and its codes. One copy a target and map, not one a
// loop.
template <bool kSigned>
HWY_NOINLINE void encode_all(BlockMoments& block, uint8_t* codes, float* scale) {
    const float largest = block.largest;
    if (!(largest <= std::numeric_limits<float>::max())) {
        *scale = std::numeric_limits<float>::quiet_NaN();
        std::memset(codes, kNotFinite, kMomentBlock);
        return;
    }
    *scale = std::max(largest, kLeastScale);
    encode_finite<kSigned>(block, *scale, codes);
}

}  // namespace ferry::optim::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // toggling guard
