// The codecs for every SIMD target.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "zero/codec.cc"
#include "base/simd_targets.h"
#include "ferry/error.h"
//
#include "hwy/foreach_target.h"
//
#include <hwy/highway.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>

#include "base/widen-inl.h"
#include "codec.h"

HWY_BEFORE_NAMESPACE();
namespace ferry::zero::HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

using ferry::HWY_NAMESPACE::F;
using ferry::HWY_NAMESPACE::I;
using ferry::HWY_NAMESPACE::load_as_f32;
using ferry::HWY_NAMESPACE::U;
using ferry::HWY_NAMESPACE::VF;
using Bytes = hn::Rebind<uint8_t, F>;
using Codes = hn::Rebind<int8_t, F>;

HWY_INLINE int64_t lanes() { return static_cast<int64_t>(hn::Lanes(F())); }

HWY_INLINE auto magnitude_bits(const float* values) {
    const I d;
    return hn::And(hn::BitCast(d, hn::LoadU(F(), values)), hn::Set(d, 0x7fffffff));
}

// The bits of the largest magnitude. As integers infinities are beyond all numbers, and NaNs beyond
// those.
HWY_INLINE uint32_t largest_bits(const float* values, int64_t count) {
    const I d;
    auto a = hn::Zero(d), b = a;
    int64_t i = 0;
    for (; i + 2 * lanes() <= count; i += 2 * lanes()) {
        a = hn::Max(a, magnitude_bits(values + i));
        b = hn::Max(b, magnitude_bits(values + i + lanes()));
    }
    HWY_ALIGN int32_t of_lane[16];
    hn::Store(hn::Max(a, b), d, of_lane);
    int32_t largest = *std::max_element(of_lane, of_lane + lanes());
    for (; i < count; ++i)
        largest = std::max(largest, std::bit_cast<int32_t>(values[i]) & 0x7fffffff);
    return static_cast<uint32_t>(largest);
}

HWY_INLINE int code_of(float value, float factor) {
    return static_cast<int>(std::nearbyint(value * factor));
}

HWY_INLINE auto codes_of(const float* values, VF factor) {
    return hn::NearestInt(hn::Mul(hn::LoadU(F(), values), factor));
}

HWY_INLINE void encode_bytes(const float* values, int64_t count, float factor, uint8_t* codes) {
    const VF of_all = hn::Set(F(), factor);
    auto* out = reinterpret_cast<int8_t*>(codes);
    int64_t i = 0;
    for (; i + lanes() <= count; i += lanes())
        hn::StoreU(hn::DemoteTo(Codes(), codes_of(values + i, of_all)), Codes(), out + i);
    for (; i < count; ++i) out[i] = static_cast<int8_t>(code_of(values[i], factor));
}

HWY_INLINE void encode_halves(const float* values, int64_t count, float factor, uint8_t* codes) {
    const int64_t half = (count + 1) / 2;
    const VF of_all = hn::Set(F(), factor);
    const auto low_bits = hn::Set(I(), 15);
    int64_t i = 0;
    for (; i + lanes() <= count - half; i += lanes()) {
        const auto low = hn::And(codes_of(values + i, of_all), low_bits);
        const auto high = hn::And(codes_of(values + half + i, of_all), low_bits);
        const auto both = hn::Or(low, hn::ShiftLeft<4>(high));
        hn::StoreU(hn::TruncateTo(Bytes(), hn::BitCast(U(), both)), Bytes(), codes + i);
    }
    for (; i < half; ++i) {
        const int high = half + i < count ? code_of(values[half + i], factor) : 0;
        codes[i] = static_cast<uint8_t>((code_of(values[i], factor) & 15) | (high & 15) << 4);
    }
}

// Of 16 lanes, whatever the target's: element j of each 16 belongs to lane j.
HWY_INLINE float sum_of_magnitudes(const float* values, int64_t count) {
    const F d;
    HWY_ALIGN float sums[16] = {};
    int64_t i = 0;
    for (int64_t lane = 0; lane < 16; lane += lanes()) {
        VF sum = hn::Zero(d);
        for (i = 0; i + 16 <= count; i += 16)
            sum = hn::Add(sum, hn::Abs(hn::LoadU(d, values + i + lane)));
        hn::Store(sum, d, sums + lane);
    }
    for (int64_t lane = 0; i + lane < count; ++lane) sums[lane] += std::abs(values[i + lane]);
    for (int64_t apart = 8; apart > 0; apart /= 2) {
        for (int64_t lane = 0; lane < apart; ++lane) sums[lane] += sums[lane + apart];
    }
    return sums[0];
}

HWY_INLINE void encode_signs(const float* values, int64_t count, uint8_t* codes) {
    const I d;
    int64_t i = 0;
    for (; i + 16 <= count; i += 16) {
        uint64_t bits = 0;
        for (int64_t at = 0; at < 16; at += lanes()) {
            const auto value = hn::BitCast(d, hn::LoadU(F(), values + i + at));
            uint64_t mine = 0;
            std::array<uint8_t, 8> bytes{};
            hn::StoreMaskBits(d, hn::Lt(value, hn::Zero(d)), bytes.data());
            std::memcpy(&mine, bytes.data(), sizeof mine);
            bits |= mine << at;
        }
        codes[i / 8] = static_cast<uint8_t>(bits);
        codes[i / 8 + 1] = static_cast<uint8_t>(bits >> 8);
    }
    for (; i < count; i += 8) {
        uint32_t bits = 0;
        for (int64_t j = 0; j < std::min<int64_t>(8, count - i); ++j)
            bits |= (std::bit_cast<uint32_t>(values[i + j]) >> 31) << j;
        codes[i / 8] = static_cast<uint8_t>(bits);
    }
}

template <CodecKind kKind>
HWY_INLINE void encode_block(const float* values, int64_t count, std::byte* scales, std::byte* at) {
    constexpr float kLevels = kKind == CodecKind::int8 ? 127 : 7;
    constexpr bool kSigns = kKind == CodecKind::sign;
    auto* codes = reinterpret_cast<uint8_t*>(at);
    const uint32_t bits = largest_bits(values, count);
    const auto largest = std::bit_cast<float>(bits);
    float scale = 0;
    if (largest >= kLeastCoded && largest < kBeyondCoded) {
        scale = kSigns ? sum_of_magnitudes(values, count) / static_cast<float>(count)
                       : largest / kLevels;
        const float factor = kLevels / largest;
        if constexpr (kKind == CodecKind::int8)
            encode_bytes(values, count, factor, codes);
        else if constexpr (kKind == CodecKind::int4)
            encode_halves(values, count, factor, codes);
        else
            encode_signs(values, count, codes);
    } else {
        const bool finite = bits < std::bit_cast<uint32_t>(kBeyondCoded);
        scale = finite ? 0 : std::numeric_limits<float>::quiet_NaN();
        const int64_t bytes = kSigns                     ? (count + 7) / 8
                              : kKind == CodecKind::int8 ? count
                                                         : (count + 1) / 2;
        std::memset(codes, 0, static_cast<size_t>(bytes));
    }
    std::memcpy(scales, &scale, sizeof scale);
}

// ---------------------------------------------------------------- decode

template <bool kAdd>
HWY_INLINE void put(VF value, float* to) {
    const F d;
    hn::StoreU(kAdd ? hn::Add(hn::LoadU(d, to), value) : value, d, to);
}
template <bool kAdd>
HWY_INLINE void put(float value, float* to) {
    *to = kAdd ? *to + value : value;
}

template <bool kAdd>
HWY_INLINE void decode_bytes(const uint8_t* codes, int64_t count, float scale, float* values) {
    const F d;
    const auto* in = reinterpret_cast<const int8_t*>(codes);
    const VF of_all = hn::Set(d, scale);
    int64_t i = 0;
    for (; i + lanes() <= count; i += lanes()) {
        const auto code = hn::PromoteTo(I(), hn::LoadU(Codes(), in + i));
        put<kAdd>(hn::Mul(hn::ConvertTo(d, code), of_all), values + i);
    }
    for (; i < count; ++i) put<kAdd>(static_cast<float>(in[i]) * scale, values + i);
}

template <bool kAdd>
HWY_INLINE void decode_halves(const uint8_t* codes, int64_t count, float scale, float* values) {
    const F d;
    const int64_t half = (count + 1) / 2;
    const VF of_all = hn::Set(d, scale);
    int64_t i = 0;
    for (; i + lanes() <= count - half; i += lanes()) {
        const auto both = hn::PromoteTo(I(), hn::LoadU(Bytes(), codes + i));
        const auto low = hn::ShiftRight<28>(hn::ShiftLeft<28>(both));
        const auto high = hn::ShiftRight<28>(hn::ShiftLeft<24>(both));
        put<kAdd>(hn::Mul(hn::ConvertTo(d, low), of_all), values + i);
        put<kAdd>(hn::Mul(hn::ConvertTo(d, high), of_all), values + half + i);
    }
    const auto value = [scale](int bits) {
        return static_cast<float>(bits < 8 ? bits : bits - 16) * scale;
    };
    for (; i < half; ++i) {
        put<kAdd>(value(codes[i] & 15), values + i);
        if (half + i < count) put<kAdd>(value(codes[i] >> 4), values + half + i);
    }
}

template <bool kAdd>
HWY_INLINE void decode_signs(const uint8_t* codes, int64_t count, float scale, float* values) {
    const F d;
    const I of_bits;
    const auto scales = hn::Set(of_bits, std::bit_cast<int32_t>(scale));
    const auto lane_bits = hn::Shl(hn::Set(of_bits, 1), hn::Iota(of_bits, 0));
    const auto sign = hn::Set(of_bits, std::numeric_limits<int32_t>::min());
    int64_t i = 0;
    for (; i + 16 <= count; i += 16) {
        const int32_t bits = codes[i / 8] | codes[i / 8 + 1] << 8;
        for (int64_t at = 0; at < 16; at += lanes()) {
            const auto mine = hn::And(hn::Set(of_bits, bits >> at), lane_bits);
            const auto signs = hn::VecFromMask(of_bits, hn::Eq(mine, lane_bits));
            const auto value = hn::Xor(scales, hn::And(signs, sign));
            put<kAdd>(hn::BitCast(d, value), values + i + at);
        }
    }
    for (; i < count; ++i)
        put<kAdd>((codes[i / 8] >> (i % 8) & 1) != 0 ? -scale : scale, values + i);
}

template <bool kAdd>
void decode_run(const Codec& codec, ConstPart part, int64_t first, int64_t count, float* values) {
    for (int64_t at = 0; at < count; at += codec.block) {
        const int64_t here = std::min(codec.block, count - at);
        const auto* codes = reinterpret_cast<const uint8_t*>(part.codes(codec, first + at));
        float scale = 0;
        std::memcpy(&scale, part.scales(codec, first + at), sizeof scale);
        if (codec.kind == CodecKind::int8)
            decode_bytes<kAdd>(codes, here, scale, values + at);
        else if (codec.kind == CodecKind::sign)
            decode_signs<kAdd>(codes, here, scale, values + at);
        else
            decode_halves<kAdd>(codes, here, scale, values + at);
    }
}

// ---------------------------------------------------------------- what is exported

void encode_all(const Codec& codec, const float* values, int64_t count, Part part, int64_t first) {
    for (int64_t at = 0; at < count; at += codec.block) {
        const int64_t here = std::min(codec.block, count - at);
        std::byte* scales = part.scales(codec, first + at);
        std::byte* codes = part.codes(codec, first + at);
        if (codec.kind == CodecKind::int8)
            encode_block<CodecKind::int8>(values + at, here, scales, codes);
        else if (codec.kind == CodecKind::sign)
            encode_block<CodecKind::sign>(values + at, here, scales, codes);
        else
            encode_block<CodecKind::int4>(values + at, here, scales, codes);
    }
}
void decode_all(const Codec& codec, ConstPart part, int64_t first, int64_t count, float* values) {
    decode_run<false>(codec, part, first, count, values);
}
void add_all(const Codec& codec, ConstPart part, int64_t first, int64_t count, float* values) {
    decode_run<true>(codec, part, first, count, values);
}

template <DType kType, float (*one)(uint16_t)>
HWY_INLINE void widen_halves(const uint16_t* data, int64_t count, float* values) {
    int64_t i = 0;
    for (; i + lanes() <= count; i += lanes())
        hn::StoreU(load_as_f32<kType>(data, i), F(), values + i);
    for (; i < count; ++i) values[i] = one(data[i]);
}
void widen_bf16(const uint16_t* data, int64_t count, float* values) {
    widen_halves<DType::bf16, from_bf16>(data, count, values);
}
void widen_f16(const uint16_t* data, int64_t count, float* values) {
    widen_halves<DType::f16, from_f16>(data, count, values);
}

const char* target_name() { return hwy::TargetName(HWY_TARGET); }

}  // namespace ferry::zero::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace ferry::zero {
namespace {

HWY_EXPORT(encode_all);
HWY_EXPORT(decode_all);
HWY_EXPORT(add_all);
HWY_EXPORT(widen_bf16);
HWY_EXPORT(widen_f16);
HWY_EXPORT(target_name);

void check(const Codec& codec, int64_t first, int64_t count, int64_t of) {
    FERRY_CHECK(codec.on() && count >= 0 && first % codec.block == 0 && first + count <= of);
}

}  // namespace

void encode(const Codec& codec, const float* values, int64_t count, Part part, int64_t first) {
    check(codec, first, count, part.count);
    HWY_DYNAMIC_DISPATCH(encode_all)(codec, values, count, part, first);
}

void decode(const Codec& codec, ConstPart part, int64_t first, int64_t count, float* values) {
    check(codec, first, count, part.count);
    HWY_DYNAMIC_DISPATCH(decode_all)(codec, part, first, count, values);
}

void decode_add(const Codec& codec, ConstPart part, int64_t first, int64_t count, float* values) {
    check(codec, first, count, part.count);
    HWY_DYNAMIC_DISPATCH(add_all)(codec, part, first, count, values);
}

void widen(DType type, const std::byte* data, int64_t count, float* values) {
    const auto* half = reinterpret_cast<const uint16_t*>(data);
    switch (type) {
        case DType::f32:
            std::memcpy(values, data, static_cast<size_t>(count * 4));
            return;
        case DType::bf16:
            return HWY_DYNAMIC_DISPATCH(widen_bf16)(half, count, values);
        case DType::f16:
            return HWY_DYNAMIC_DISPATCH(widen_f16)(half, count, values);
    }
    FERRY_CHECK(false, "unknown type");
}

std::string text_of(const Codec& codec) {
    if (!codec.on()) return "none";
    const char* kind = codec.kind == CodecKind::int8   ? "int8"
                       : codec.kind == CodecKind::int4 ? "int4"
                                                       : "signs";
    return kind + (" in blocks of " + std::to_string(codec.block));
}

std::string codec_target() { return HWY_DYNAMIC_DISPATCH(target_name)(); }

}  // namespace ferry::zero
#endif
