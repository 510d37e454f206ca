// The codecs for every SIMD target.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "zero/codec.cc"
#include "base/simd_targets.h"
#include "ferry/error.h"
//
#include "hwy/foreach_target.h"
//
#include <hwy/cache_control.h>
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
    int32_t largest = hn::GetLane(hn::MaxOfLanes(d, hn::Max(a, b)));
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

// Lane j with j + 8, then + 4, + 2 and + 1.
HWY_INLINE float sum_of_lanes(float* of_16) {
    for (int64_t lane = 0; lane < 8; ++lane) of_16[lane] += of_16[lane + 8];
    for (int64_t lane = 0; lane < 4; ++lane) of_16[lane] += of_16[lane + 4];
    return (of_16[0] + of_16[2]) + (of_16[1] + of_16[3]);
}

// The sign bits of 16 values, the first the lowest.
HWY_INLINE void put_signs(const float* values, uint8_t* codes) {
    const I d;
    const auto negative = [&](int64_t at) {
        return hn::Lt(hn::BitCast(d, hn::LoadU(F(), values + at)), hn::Zero(d));
    };
    if (lanes() >= 8) {
        for (int64_t at = 0; at < 16; at += lanes())
            hn::StoreMaskBits(d, negative(at), codes + at / 8);
        return;
    }
    uint32_t bits = 0;
    for (int64_t at = 0; at < 16; at += lanes()) {
        std::array<uint8_t, 8> mine{};
        hn::StoreMaskBits(d, negative(at), mine.data());
        bits |= static_cast<uint32_t>(mine[0]) << at;
    }
    codes[0] = static_cast<uint8_t>(bits);
    codes[1] = static_cast<uint8_t>(bits >> 8);
}

// What is left of a block that is no multiple of 16.
HWY_INLINE void put_last_signs(const float* values, int64_t count, uint8_t* codes) {
    for (int64_t i = 0; i < count; i += 8) {
        uint32_t bits = 0;
        for (int64_t j = 0; j < std::min<int64_t>(8, count - i); ++j)
            bits |= (std::bit_cast<uint32_t>(values[i + j]) >> 31) << j;
        codes[i / 8] = static_cast<uint8_t>(bits);
    }
}

struct OfBlock {
    uint32_t largest_bits = 0;  // as largest_bits()
    float sum = 0;              // of magnitudes
};

// Signs, largest magnitude and sum in one pass: three would be bound by their loads. The sum is of
// 16 lanes, whatever the target's: element j of each 16 belongs to lane j. So 16 / N vectors of N
// lanes add up; N may be known at run time alone, and SVE's vectors make no array.
HWY_INLINE OfBlock encode_signs(const float* values, int64_t count, uint8_t* codes) {
    const F d;
    const I of_bits;
    VF a = hn::Zero(d), b = a, c = a, e = a;
    auto largest = hn::Zero(of_bits);
    const auto add = [&](VF& sum, const float* from) HWY_ATTR {
        const auto bits = magnitude_bits(from);
        sum = hn::Add(sum, hn::BitCast(d, bits));
        largest = hn::Max(largest, bits);
    };
    int64_t i = 0;
    for (; i + 16 <= count; i += 16) {
        add(a, values + i);
        if (lanes() <= 8) add(b, values + i + lanes());
        if (lanes() <= 4) add(c, values + i + 2 * lanes());
        if (lanes() <= 4) add(e, values + i + 3 * lanes());
        put_signs(values + i, codes + i / 8);
    }
    HWY_ALIGN float sums[4 * 16] = {};
    hn::StoreU(a, d, sums);
    hn::StoreU(b, d, sums + lanes());
    hn::StoreU(c, d, sums + 2 * lanes());
    hn::StoreU(e, d, sums + 3 * lanes());
    int32_t most = hn::GetLane(hn::MaxOfLanes(of_bits, largest));
    for (int64_t lane = 0; i + lane < count; ++lane) {
        const float value = std::abs(values[i + lane]);
        sums[lane] += value;
        most = std::max(most, std::bit_cast<int32_t>(value));
    }
    put_last_signs(values + i, count - i, codes + i / 8);
    return {.largest_bits = static_cast<uint32_t>(most), .sum = sum_of_lanes(sums)};
}

template <CodecKind kKind>
HWY_INLINE float encode_block(const float* values, int64_t count, uint8_t* codes, int64_t bytes) {
    constexpr float kLevels = kKind == CodecKind::int8 ? 127 : 7;
    constexpr bool kSigns = kKind == CodecKind::sign;
    OfBlock block;
    if constexpr (kSigns)
        block = encode_signs(values, count, codes);
    else
        block.largest_bits = largest_bits(values, count);
    const auto largest = std::bit_cast<float>(block.largest_bits);
    if (!(largest >= kLeastCoded && largest < kBeyondCoded)) {
        std::memset(codes, 0, static_cast<size_t>(bytes));
        const bool finite = block.largest_bits < std::bit_cast<uint32_t>(kBeyondCoded);
        return finite ? 0 : std::numeric_limits<float>::quiet_NaN();
    }
    if constexpr (kSigns) return block.sum / static_cast<float>(count);
    const float factor = kLevels / largest;
    if constexpr (kKind == CodecKind::int8)
        encode_bytes(values, count, factor, codes);
    else if constexpr (kKind == CodecKind::int4)
        encode_halves(values, count, factor, codes);
    return largest / kLevels;
}

// ---------------------------------------------------------------- decode

// An ordinary store first reads the line that it is about to overwrite. A span that no cache keeps
// is written past them.
enum class Put : uint8_t { cached, streamed, added };
constexpr int64_t kLeastStreamed = kLeastStreamedBytes / 4;

template <Put kPut>
HWY_INLINE void put(VF value, float* to) {
    const F d;
    if constexpr (kPut == Put::streamed)
        hn::Stream(value, d, to);
    else
        hn::StoreU(kPut == Put::added ? hn::Add(hn::LoadU(d, to), value) : value, d, to);
}
template <Put kPut>
HWY_INLINE void put(float value, float* to) {
    *to = kPut == Put::added ? *to + value : value;
}

template <Put kPut>
HWY_INLINE void decode_bytes(const uint8_t* codes, int64_t count, float scale, float* values) {
    const F d;
    const auto* in = reinterpret_cast<const int8_t*>(codes);
    const VF of_all = hn::Set(d, scale);
    int64_t i = 0;
    for (; i + lanes() <= count; i += lanes()) {
        const auto code = hn::PromoteTo(I(), hn::LoadU(Codes(), in + i));
        put<kPut>(hn::Mul(hn::ConvertTo(d, code), of_all), values + i);
    }
    for (; i < count; ++i) put<kPut>(static_cast<float>(in[i]) * scale, values + i);
}

template <Put kPut>
HWY_INLINE void decode_halves(const uint8_t* codes, int64_t count, float scale, float* values) {
    const F d;
    const int64_t half = (count + 1) / 2;
    const VF of_all = hn::Set(d, scale);
    int64_t i = 0;
    for (; i + lanes() <= count - half; i += lanes()) {
        const auto both = hn::PromoteTo(I(), hn::LoadU(Bytes(), codes + i));
        const auto low = hn::ShiftRight<28>(hn::ShiftLeft<28>(both));
        const auto high = hn::ShiftRight<28>(hn::ShiftLeft<24>(both));
        put<kPut>(hn::Mul(hn::ConvertTo(d, low), of_all), values + i);
        put<kPut>(hn::Mul(hn::ConvertTo(d, high), of_all), values + half + i);
    }
    const auto value = [scale](int bits) {
        return static_cast<float>(bits < 8 ? bits : bits - 16) * scale;
    };
    for (; i < half; ++i) {
        put<kPut>(value(codes[i] & 15), values + i);
        if (half + i < count) put<kPut>(value(codes[i] >> 4), values + half + i);
    }
}

template <Put kPut>
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
            put<kPut>(hn::BitCast(d, value), values + i + at);
        }
    }
    for (; i < count; ++i)
        put<kPut>((codes[i / 8] >> (i % 8) & 1) != 0 ? -scale : scale, values + i);
}

template <CodecKind kKind, Put kPut>
HWY_INLINE void decode_block(const uint8_t* codes, int64_t count, float scale, float* values) {
    if constexpr (kKind == CodecKind::int8)
        decode_bytes<kPut>(codes, count, scale, values);
    else if constexpr (kKind == CodecKind::sign)
        decode_signs<kPut>(codes, count, scale, values);
    else
        decode_halves<kPut>(codes, count, scale, values);
}

// The blocks of a run, each with the place of its scale and of its codes.
template <class Byte, class Body>
HWY_INLINE void for_blocks(const Codec& codec, const PartOf<Byte>& part, int64_t first,
                           int64_t count, const Body& body) {
    const int64_t block = codec.block, bytes = codec.code_bytes(block);
    Byte* scales = part.scales(codec, first);
    Byte* codes = part.codes(codec, first);
    for (int64_t at = 0; at < count; at += block, scales += 4, codes += bytes)
        body(at, std::min(block, count - at), scales, codes);
}

template <CodecKind kKind, Put kPut>
void decode_run(const Codec& codec, ConstPart part, int64_t first, int64_t count, float* values) {
    for_blocks(codec, part, first, count,
               [&](int64_t at, int64_t here, const std::byte* scales, const std::byte* from) {
                   const auto* codes = reinterpret_cast<const uint8_t*>(from);
                   float scale = 0;
                   std::memcpy(&scale, scales, sizeof scale);
                   // The halves of a last block may lie anywhere.
                   if (kPut == Put::streamed && here < codec.block)
                       decode_block<kKind, Put::cached>(codes, here, scale, values + at);
                   else
                       decode_block<kKind, kPut>(codes, here, scale, values + at);
               });
    if (kPut == Put::streamed) hwy::FlushStream();
}

template <Put kPut>
void decode_any(const Codec& codec, ConstPart part, int64_t first, int64_t count, float* values) {
    if (codec.kind == CodecKind::int8)
        decode_run<CodecKind::int8, kPut>(codec, part, first, count, values);
    else if (codec.kind == CodecKind::sign)
        decode_run<CodecKind::sign, kPut>(codec, part, first, count, values);
    else
        decode_run<CodecKind::int4, kPut>(codec, part, first, count, values);
}

// ---------------------------------------------------------------- what is exported

template <CodecKind kKind>
void encode_run(const Codec& codec, const float* values, int64_t count, Part part, int64_t first) {
    for_blocks(codec, part, first, count,
               [&](int64_t at, int64_t here, std::byte* scales, std::byte* to) {
                   const float scale = encode_block<kKind>(
                       values + at, here, reinterpret_cast<uint8_t*>(to), codec.code_bytes(here));
                   std::memcpy(scales, &scale, sizeof scale);
               });
}
void encode_all(const Codec& codec, const float* values, int64_t count, Part part, int64_t first) {
    if (codec.kind == CodecKind::int8)
        encode_run<CodecKind::int8>(codec, values, count, part, first);
    else if (codec.kind == CodecKind::sign && hn::MaxLanes(F()) < 4)
        encode_reference(codec, values, count, part, first);
    else if (codec.kind == CodecKind::sign)
        encode_run<CodecKind::sign>(codec, values, count, part, first);
    else
        encode_run<CodecKind::int4>(codec, values, count, part, first);
}
void decode_all(const Codec& codec, ConstPart part, int64_t first, int64_t count, float* values) {
    const bool aligned = reinterpret_cast<uintptr_t>(values) % 64 == 0;
    if (aligned && count >= kLeastStreamed)
        decode_any<Put::streamed>(codec, part, first, count, values);
    else
        decode_any<Put::cached>(codec, part, first, count, values);
}
void add_all(const Codec& codec, ConstPart part, int64_t first, int64_t count, float* values) {
    decode_any<Put::added>(codec, part, first, count, values);
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
