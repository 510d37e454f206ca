// Codes as values: one, or four of a whole block.
#pragma once

#include "quads.h"

namespace ferry::zero::cuda {

// A part from the first element that is decoded on.
struct Coded {
    const std::byte *scales, *codes;
    int64_t count;
    int block, block_bits;
};

__device__ inline float with_sign(float scale, uint32_t bit) {
    return __uint_as_float(__float_as_uint(scale) ^ bit << 31);
}
__device__ inline float signed_half(uint32_t bits) {
    return static_cast<float>(static_cast<int32_t>(bits << 28) >> 28);
}

// Where four elements of a whole block are, from a multiple of four on: from the scales on, alike
// in every part of as many elements.
struct Place {
    int64_t scale, codes;  // bytes
    int shift;             // of the first one's code
};
template <CodecKind kKind>
__device__ Place place_of(const Coded& part, int64_t i) {
    Place place{(i >> part.block_bits) * int64_t{sizeof(float)}, part.codes - part.scales, 0};
    if (kKind == CodecKind::int8) {
        place.codes += i;
    } else if (kKind == CodecKind::int4) {
        const int within = static_cast<int>(i) & (part.block - 1), half = part.block / 2;
        const bool high = within >= half;
        place.codes += (i - within) / 2 + (high ? within - half : within);
        place.shift = high ? 4 : 0;
    } else {
        place.codes += i / 8;
        place.shift = static_cast<int>(i % 8);
    }
    return place;
}
// With any NaN.
template <CodecKind kKind>
__device__ Quad decoded_at(const std::byte* scales, const Place& place) {
    const float scale = *reinterpret_cast<const float*>(scales + place.scale);
    Quad quad;
    if (kKind == CodecKind::sign) {
        const uint32_t bits = static_cast<uint32_t>(scales[place.codes]) >> place.shift;
        for (int k = 0; k < kQuad; ++k) quad.at[k] = with_sign(scale, bits >> k & 1);
        return quad;
    }
    const uint32_t word = *reinterpret_cast<const uint32_t*>(scales + place.codes) >> place.shift;
    for (int k = 0; k < kQuad; ++k) {
        const uint32_t bits = word >> (8 * k);
        const float code = kKind == CodecKind::int8 ? static_cast<float>(static_cast<int8_t>(bits))
                                                    : signed_half(bits);
        quad.at[k] = code * scale;
    }
    return quad;
}

// One element of any block.
template <CodecKind kKind>
__device__ float decoded_one(const Coded& part, int64_t i) {
    const int64_t begin = i >> part.block_bits << part.block_bits;
    const auto within = static_cast<int>(i - begin);
    const float scale = reinterpret_cast<const float*>(part.scales)[i >> part.block_bits];
    const std::byte* codes = part.codes + code_bytes<kKind>(begin);
    if (kKind == CodecKind::int8)
        return static_cast<float>(static_cast<int8_t>(codes[within])) * scale;
    if (kKind == CodecKind::sign)
        return with_sign(scale, static_cast<uint32_t>(codes[within / 8]) >> (within % 8) & 1);
    const auto count = static_cast<int>(min(int64_t{part.block}, part.count - begin));
    const int half = (count + 1) / 2;
    const bool high = within >= half;
    const auto byte = static_cast<uint32_t>(codes[high ? within - half : within]);
    return signed_half(byte >> (high ? 4 : 0)) * scale;
}

}  // namespace ferry::zero::cuda
