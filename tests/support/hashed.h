// Numbers of the golden tests: a hash of integers in [-1, 1), as the scripts that make their files
// have it.
#pragma once

#include <cstdint>

namespace ferry {

inline float hashed(int64_t step, int64_t i) {
    uint32_t x = static_cast<uint32_t>(i) * 0x9E3779B1u + static_cast<uint32_t>(step) * 0x85EBCA77u;
    x ^= x >> 15;
    x *= 0x2C1B3C6Du;
    x ^= x >> 12;
    x *= 0x297A2D39u;
    x ^= x >> 15;
    return static_cast<float>(static_cast<int64_t>(x >> 8) - (1 << 23)) * 0x1p-23f;
}

}  // namespace ferry
