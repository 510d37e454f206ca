#include <xxhash.h>

#include <bit>
#include <cmath>
#include <numbers>

#include "base/checksum.h"
#include "base/random.h"
#include "ferry/dtype.h"

namespace ferry {

std::string_view name_of(MomentType type) {
    switch (type) {
        case MomentType::f32:
            return "fp32";
        case MomentType::bf16:
            return "bf16";
        case MomentType::int8:
            return "int8";
    }
    return "?";
}

std::string_view name_of(DType type) {
    switch (type) {
        case DType::f32:
            return "fp32";
        case DType::bf16:
            return "bf16";
        case DType::f16:
            return "fp16";
    }
    return "?";
}

std::optional<DType> dtype_from_name(std::string_view name) {
    for (const DType type : {DType::f32, DType::bf16, DType::f16}) {
        if (name == name_of(type)) return type;
    }
    return std::nullopt;
}

uint16_t to_bf16(float value) noexcept {
    const uint32_t bits = std::bit_cast<uint32_t>(value);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>((bits >> 16) | 0x40u);
    return static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

float from_bf16(uint16_t bits) noexcept {
    return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16);
}

uint16_t to_f16(float value) noexcept {
    const uint32_t bits = std::bit_cast<uint32_t>(value);
    const uint32_t sign = (bits >> 16) & 0x8000u;
    const uint32_t magnitude = bits & 0x7fffffffu;
    if (magnitude > 0x7f800000u) return static_cast<uint16_t>(sign | 0x7e00u);
    // 65520 and above round to infinity.
    if (magnitude >= 0x477ff000u) return static_cast<uint16_t>(sign | 0x7c00u);
    if (magnitude >= 0x38800000u) {  // normal in half precision
        const uint32_t rounded = magnitude + 0xfffu + ((magnitude >> 13) & 1u);
        return static_cast<uint16_t>(sign | ((rounded - 0x38000000u) >> 13));
    }
    if (magnitude < 0x33000000u) return static_cast<uint16_t>(sign);  // below half of 2^-24
    const uint32_t shift = 126u - (magnitude >> 23);                  // 14 .. 24
    const uint32_t mantissa = (magnitude & 0x7fffffu) | 0x800000u;
    const uint32_t half = 1u << (shift - 1);
    const uint32_t quotient = mantissa >> shift;
    const uint32_t rest = mantissa & ((1u << shift) - 1u);
    const bool up = rest > half || (rest == half && (quotient & 1u));
    return static_cast<uint16_t>(sign | (quotient + (up ? 1u : 0u)));
}

float from_f16(uint16_t bits) noexcept {
    const uint32_t sign = static_cast<uint32_t>(bits & 0x8000u) << 16;
    const uint32_t exponent = (bits >> 10) & 0x1fu;
    const uint32_t mantissa = bits & 0x3ffu;
    if (exponent == 31) return std::bit_cast<float>(sign | 0x7f800000u | (mantissa << 13));
    if (exponent != 0)
        return std::bit_cast<float>(sign | ((exponent + 112u) << 23) | (mantissa << 13));
    const float magnitude = std::ldexp(static_cast<float>(mantissa), -24);
    return sign ? -magnitude : magnitude;
}

std::array<uint32_t, 4> philox(PhiloxKey key, std::array<uint32_t, 4> counter) noexcept {
    uint32_t k0 = key.seed, k1 = static_cast<uint32_t>(key.purpose);
    for (int round = 0; round < 10; ++round) {
        const uint64_t a = uint64_t{0xD2511F53u} * counter[0];
        const uint64_t b = uint64_t{0xCD9E8D57u} * counter[2];
        counter = {static_cast<uint32_t>(b >> 32) ^ counter[1] ^ k0, static_cast<uint32_t>(b),
                   static_cast<uint32_t>(a >> 32) ^ counter[3] ^ k1, static_cast<uint32_t>(a)};
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    return counter;
}

float philox_normal(PhiloxKey key, std::array<uint32_t, 4> counter) noexcept {
    const std::array<uint32_t, 4> bits = philox(key, counter);
    const uint64_t wide = (uint64_t{bits[0]} << 32 | bits[1]) >> 11;
    const double u = (static_cast<double>(wide) + 0.5) * 0x1p-53;
    const double turn = static_cast<double>(bits[2]) * 0x1p-32;
    return static_cast<float>(std::sqrt(-2 * std::log(u)) * std::cos(2 * std::numbers::pi * turn));
}

uint64_t checksum(std::span<const std::byte> bytes) noexcept {
    return XXH3_64bits(bytes.data(), bytes.size());
}

}  // namespace ferry
