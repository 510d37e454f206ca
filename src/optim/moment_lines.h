// A map's stretches (moment_map.h) as tables of 16 floats, for targets that look them up in a
// register.
#pragma once

#include <bit>
#include <cstdint>

#include "moment_map.h"

namespace ferry::optim {

template <bool kSigned>
struct MomentLines {
    static constexpr const MomentMap& kMap = kSigned ? kWithSign : kWithoutSign;
    // Indexed by the low four bits of a place's exponent; 0 has a place of exponent 0 with signs,
    // and of 127 without. `rest` is taken from `base` times the scale.
    alignas(64) float rise[16] = {}, base[16] = {}, rest[16] = {};
    // Indexed by the exponent of x without its last bit, from 52 to 63; each such range of x has
    // one border at most. The last four bits index the others, or one less than their index.
    alignas(64) float border[16] = {};
    alignas(64) float slope[16] = {}, offset[16] = {}, last[16] = {};

    constexpr MomentLines() {
        for (int stretch = 0; stretch < kStretches; ++stretch) {
            const int at = kSigned ? stretch : (127 + stretch) & 15;
            rise[at] = kMap.rise[stretch];
            base[at] = kMap.base[stretch];
            slope[stretch] = kMap.slope[stretch];
            offset[stretch] = kMap.offset[stretch];
            last[stretch] = kMap.last_of(stretch);
        }
        if (!kSigned) rest[15] = kLeastSquare;
        int stretch = 0;
        for (uint32_t range = 52; range < 64; ++range) {
            const bool inside = stretch + 1 < kStretches &&
                                std::bit_cast<uint32_t>(kMap.border[stretch]) < (range + 1) << 24;
            const uint32_t end = ((range + 1) << 24) + static_cast<uint32_t>(stretch);
            border[range & 15] = inside ? kMap.border[stretch] : std::bit_cast<float>(end);
            if (inside) ++stretch;
        }
    }

    // Whether each border is in a range of its own, from 52 on.
    constexpr bool is_sound() const {
        uint32_t before = 51;
        for (const float one : kMap.border) {
            const uint32_t range = std::bit_cast<uint32_t>(one) >> 24;
            if (range <= before || range >= 64) return false;
            before = range;
        }
        return true;
    }
};

template <bool kSigned>
inline constexpr MomentLines<kSigned> kMomentLines{};
static_assert(kMomentLines<true>.is_sound() && kMomentLines<false>.is_sound());

}  // namespace ferry::optim
