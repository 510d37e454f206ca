// The two maps from codes to shares of a block's scale, and where one code ends and the next
// begins (ferry/optim.h). The CPU and the GPU read the same constants.
#pragma once

#include <bit>
#include <cstdint>

namespace ferry::optim {

constexpr int kCodes = 256;
// The least scale of a moment block.
constexpr float kLeastScale = 1e-12f;
// The code of a share of 0, in the map with signs; in the other it is 0.
constexpr uint8_t kZeroWithSign = 127;
// Codes of a block that is not finite: they stand for a share of 1.
constexpr uint8_t kNotFinite = 255;

// The rule by which a share between two neighbours rounds to the upper one.
constexpr bool rounds_up(float share, float down, float up) {
    return share - down >= (up - down) * 0.5f;
}

// The neighbour of a float that is not zero, away from minus infinity or towards it.
constexpr float neighbour(float value, bool above) {
    const uint32_t bits = std::bit_cast<uint32_t>(value);
    const bool larger = (value > 0) == above;
    return std::bit_cast<float>(larger ? bits + 1 : bits - 1);
}

struct MomentMap {
    float share[kCodes] = {};  // in ascending order
    float begin[kCodes] = {};  // the least share whose code it is; of code 0 unused

    // Seven decades, each cut into equal intervals of which a code is the middle: into twice as
    // many as the decade below. Then 0 and 1.
    constexpr explicit MomentMap(bool with_sign) {
        constexpr double kDecade[] = {1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1};
        float* below_zero = share + (with_sign ? kZeroWithSign : 0);
        float* above_zero = below_zero;
        *above_zero++ = 0;
        for (int decade = 0; decade < 7; ++decade) {
            const int intervals = (with_sign ? 1 : 2) << decade;
            for (int i = 0; i < intervals; ++i) {
                const double middle = 0.1 + 0.9 * (2 * i + 1) / (2 * intervals);
                *above_zero = static_cast<float>(kDecade[decade] * middle);
                if (with_sign) *--below_zero = -*above_zero;
                ++above_zero;
            }
        }
        *above_zero = 1;
        for (int code = 1; code < kCodes; ++code)
            begin[code] = first_above(share[code - 1], share[code]);
    }

private:
    static constexpr float first_above(float down, float up) {
        float first = down + (up - down) * 0.5f;
        while (rounds_up(neighbour(first, false), down, up)) first = neighbour(first, false);
        while (!rounds_up(first, down, up)) first = neighbour(first, true);
        return first;
    }
};

constexpr MomentMap kWithSign{true}, kWithoutSign{false};

}  // namespace ferry::optim
