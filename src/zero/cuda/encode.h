// Blocks of values as codes, by a warp.
#pragma once

#include "quads.h"

namespace ferry::zero::cuda {

template <CodecKind kKind>
constexpr float kLevels = kKind == CodecKind::int8 ? 127 : 7;

__device__ inline uint32_t magnitude_bits(float value) {
    return __float_as_uint(value) & 0x7fffffffu;
}
__device__ inline bool is_coded(float largest) {
    return largest >= kLeastCoded && largest < kBeyondCoded;
}
// Of a block that is not coded.
__device__ inline float scale_of_none(float largest) {
    return largest < kBeyondCoded ? 0 : nan_of_codes();
}

template <CodecKind kKind>
__device__ float factor_of(float largest) {
    return is_coded(largest) ? kLevels<kKind> / largest : 0;
}
// A block that is not coded has a factor of zero and values that may be anything.
__device__ inline uint32_t code_of(float value, float factor) {
    return factor > 0 ? static_cast<uint32_t>(__float2int_rn(value * factor)) : 0;
}

// The largest of the warp's threads, or of those of each half.
__device__ inline uint32_t largest_of(uint32_t bits, bool of_halves) {
    for (int apart = kWarp / 4; apart > 0; apart /= 2)
        bits = max(bits, __shfl_xor_sync(kAll, bits, apart));
    return of_halves ? bits : max(bits, __shfl_xor_sync(kAll, bits, kWarp / 2));
}

// A block in any place and of any size, by a warp. `values`: a pointer, or what is like one.
template <CodecKind kKind, class Values>
__device__ void encode_slowly(Values values, int count, int lane, std::byte* scale,
                              std::byte* codes) {
    uint32_t bits = 0;
    for (int i = lane; i < count; i += kWarp) bits = max(bits, magnitude_bits(widened(values[i])));
    const float largest = __uint_as_float(largest_of(bits, false));
    float sum = 0;
    if (kKind == CodecKind::sign) {
        for (int i = lane; i < count && lane < kRow; i += kRow)
            sum = sum + fabsf(widened(values[i]));
        for (int apart = kRow / 2; apart > 0; apart /= 2)
            sum = sum + __shfl_xor_sync(kAll, sum, apart);
    }
    const float coded =
        kKind == CodecKind::sign ? sum / static_cast<float>(count) : largest / kLevels<kKind>;
    if (lane == 0)
        *reinterpret_cast<float*>(scale) = is_coded(largest) ? coded : scale_of_none(largest);
    const float factor = factor_of<kKind>(largest);
    auto* to = reinterpret_cast<uint8_t*>(codes);
    if (kKind == CodecKind::int8) {
        for (int i = lane; i < count; i += kWarp)
            to[i] = static_cast<uint8_t>(code_of(widened(values[i]), factor));
    } else if (kKind == CodecKind::int4) {
        const int half = (count + 1) / 2;
        for (int i = lane; i < half; i += kWarp) {
            const uint32_t low = code_of(widened(values[i]), factor);
            const uint32_t high = half + i < count ? code_of(widened(values[half + i]), factor) : 0;
            to[i] = static_cast<uint8_t>((low & 15) | (high & 15) << 4);
        }
    } else {
        for (int i = lane * 8; i < count; i += kWarp * 8) {
            uint32_t signs = 0;
            for (int k = 0; k < min(8, count - i); ++k)
                signs |= (__float_as_uint(widened(values[i + k])) >> 31) << k;
            to[i / 8] = static_cast<uint8_t>(factor > 0 ? signs : 0);
        }
    }
}

__device__ inline void put_word(std::byte* codes, int64_t at, uint32_t word) {
    *reinterpret_cast<uint32_t*>(codes + at) = word;
}

// Byte j of a block has code j in its low half, and code j + block / 2 in its high one: that is the
// same thread's of a later step, or in a small block another thread's of the same step.
__device__ inline void put_halves(const uint32_t (&words)[kSteps], int block, int lane,
                                  std::byte* codes) {
    const auto put = [&](int step, uint32_t high) {
        const int element = (step * kWarp + lane) * kQuad;
        const int within = element & (block - 1);
        put_word(codes, (element - within) / 2 + within, words[step] | high << 4);
    };
    const int lanes = block / 2 / kQuad, steps = lanes / kWarp;
    if (steps == 0) {
#pragma unroll
        for (int step = 0; step < kSteps; ++step) {
            const uint32_t high = __shfl_down_sync(kAll, words[step], static_cast<unsigned>(lanes));
            if ((lane & lanes) == 0) put(step, high);
        }
    }
#pragma unroll
    for (int apart = 1; apart < kSteps; apart *= 2) {
        if (apart != steps) continue;
#pragma unroll
        for (int step = 0; step < kSteps; ++step) {
            if ((step & apart) == 0) put(step, words[step + apart]);
        }
    }
}

// kTile elements by a warp, all of them in registers: four of each step's 128 are a thread's.
template <CodecKind kKind, class Values>
__device__ void encode_tile(Values values, int block, int lane, std::byte* scales,
                            std::byte* codes) {
    Quad quads[kSteps];
    uint32_t largest[kSteps];
#pragma unroll
    for (int step = 0; step < kSteps; ++step)
        quads[step] = load_quad(values + (step * kWarp + lane) * kQuad);
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
        largest[step] = 0;
        for (const float value : quads[step].at)
            largest[step] = max(largest[step], magnitude_bits(value));
    }
    const int steps = block / (kWarp * kQuad);  // of a block; 0: of half a step
#pragma unroll
    for (int apart = 1; apart < kSteps; apart *= 2) {
        if (apart >= steps) continue;
#pragma unroll
        for (int step = 0; step < kSteps; ++step) {
            if ((step & apart) != 0) continue;
            largest[step] = max(largest[step], largest[step + apart]);
            largest[step + apart] = largest[step];
        }
    }
    uint32_t words[kSteps];
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
        const float top = __uint_as_float(largest_of(largest[step], steps == 0));
        // A thread divides once: the block's first for its scale, its neighbour for the factor.
        const int element = (step * kWarp + lane) * kQuad;
        const bool leads = (element & (block - 1)) == 0;
        const float once = (leads ? top : kLevels<kKind>) / (leads ? kLevels<kKind> : top);
        if (leads)
            reinterpret_cast<float*>(scales)[element / block] =
                is_coded(top) ? once : scale_of_none(top);
        const float factor = __shfl_sync(kAll, is_coded(top) ? once : 0, lane | 1);
        constexpr uint32_t kBits = kKind == CodecKind::int8 ? 255 : 15;
        words[step] = 0;
        for (int k = 0; k < kQuad; ++k)
            words[step] |= (code_of(quads[step].at[k], factor) & kBits) << (8 * k);
        if (kKind == CodecKind::int8) put_word(codes, element, words[step]);
    }
    if (kKind == CodecKind::int4) put_halves(words, block, lane, codes);
}

}  // namespace ferry::zero::cuda
