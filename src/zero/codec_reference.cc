// The formulas of codec.h as one would write them on paper: the oracle of the fast version.
#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <limits>

#include "codec.h"
#include "ferry/error.h"

namespace ferry::zero {
namespace {

float levels_of(const Codec& codec) { return codec.kind == CodecKind::int8 ? 127 : 7; }

// Calls body(begin, count, scale's place, codes' place) for each block.
template <class Byte, class Body>
void for_blocks(const Codec& codec, const PartOf<Byte>& part, int64_t first, int64_t count,
                const Body& body) {
    FERRY_CHECK(codec.on() && first % codec.block == 0 && first + count <= part.count);
    for (int64_t at = 0; at < count; at += codec.block) {
        body(at, std::min(codec.block, count - at), part.scales(codec, first + at),
             part.codes(codec, first + at));
    }
}

void put_code(const Codec& codec, std::byte* codes, int64_t i, int64_t count, int code) {
    if (codec.kind == CodecKind::int8) {
        codes[i] = static_cast<std::byte>(code);
        return;
    }
    if (codec.kind == CodecKind::sign) {  // codes are 1 and -1
        const auto bit = static_cast<std::byte>(code < 0 ? 1 << i % 8 : 0);
        codes[i / 8] = i % 8 == 0 ? bit : codes[i / 8] | bit;
        return;
    }
    const int64_t half = (count + 1) / 2;
    const auto bits = static_cast<std::byte>(code & 15);
    if (i < half)
        codes[i] = bits;  // the high half comes later, or is zero
    else
        codes[i - half] |= bits << 4;
}

int code_at(const Codec& codec, const std::byte* codes, int64_t i, int64_t count) {
    if (codec.kind == CodecKind::int8) return static_cast<int8_t>(codes[i]);
    if (codec.kind == CodecKind::sign)
        return (static_cast<int>(codes[i / 8]) >> i % 8 & 1) != 0 ? -1 : 1;
    const int64_t half = (count + 1) / 2;
    const auto byte = static_cast<int>(codes[i < half ? i : i - half]);
    const int bits = i < half ? byte & 15 : byte >> 4;
    return bits < 8 ? bits : bits - 16;
}

float largest_of(const float* values, int64_t count) {
    float largest = 0;
    for (int64_t i = 0; i < count; ++i) {
        const float magnitude = std::abs(values[i]);
        if (!(magnitude <= largest)) largest = magnitude;  // a NaN stays
        if (std::isnan(largest)) break;
    }
    return largest;
}

// Lane j of 16 adds elements j, j + 16, ...; then lanes are added pairwise.
float sum_of_magnitudes(const float* values, int64_t count) {
    std::array<float, 16> lanes{};
    for (int64_t i = 0; i < count; ++i) lanes[static_cast<size_t>(i % 16)] += std::abs(values[i]);
    for (size_t apart = 8; apart > 0; apart /= 2) {
        for (size_t lane = 0; lane < apart; ++lane) lanes[lane] += lanes[lane + apart];
    }
    return lanes[0];
}

float scale_of(const Codec& codec, const float* values, int64_t count, float largest) {
    if (codec.kind != CodecKind::sign) return largest / levels_of(codec);
    return sum_of_magnitudes(values, count) / static_cast<float>(count);
}

int code_of(const Codec& codec, float value, float factor) {
    if (codec.kind != CodecKind::sign)
        return factor > 0 ? static_cast<int>(std::nearbyint(value * factor)) : 0;
    return factor > 0 && std::signbit(value) ? -1 : 1;
}

template <class Take>
void for_decoded(const Codec& codec, ConstPart part, int64_t first, int64_t count,
                 const Take& take) {
    for_blocks(codec, part, first, count,
               [&](int64_t at, int64_t here, const std::byte* scales, const std::byte* codes) {
                   float scale = 0;
                   std::memcpy(&scale, scales, sizeof scale);
                   for (int64_t i = 0; i < here; ++i)
                       take(at + i, static_cast<float>(code_at(codec, codes, i, here)) * scale);
               });
}

}  // namespace

void encode_reference(const Codec& codec, const float* values, int64_t count, Part part,
                      int64_t first) {
    for_blocks(codec, part, first, count,
               [&](int64_t at, int64_t here, std::byte* scales, std::byte* codes) {
                   const float largest = largest_of(values + at, here);
                   const bool finite = largest < kBeyondCoded, some = largest >= kLeastCoded;
                   const float scale = !finite ? std::numeric_limits<float>::quiet_NaN()
                                       : some  ? scale_of(codec, values + at, here, largest)
                                               : 0;
                   std::memcpy(scales, &scale, sizeof scale);
                   const float factor = finite && some ? levels_of(codec) / largest : 0;
                   for (int64_t i = 0; i < here; ++i)
                       put_code(codec, codes, i, here, code_of(codec, values[at + i], factor));
               });
}

void decode_reference(const Codec& codec, ConstPart part, int64_t first, int64_t count,
                      float* values) {
    for_decoded(codec, part, first, count, [&](int64_t i, float value) { values[i] = value; });
}

void decode_add_reference(const Codec& codec, ConstPart part, int64_t first, int64_t count,
                          float* values) {
    for_decoded(codec, part, first, count,
                [&](int64_t i, float value) { values[i] = values[i] + value; });
}

}  // namespace ferry::zero
