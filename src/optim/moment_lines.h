// The two maps as straight lines, for targets that look tables up in registers: a code's share and
// a share's code are both linear within a decade (moment_map.h).
#pragma once

#include <bit>
#include <cstdint>

#include "moment_map.h"

namespace ferry::optim {

// Stretches of the map by magnitude: shares that round to zero, the seven decades, and 1.
constexpr int kStretches = 9;
// A code found by a line is in doubt this close to where the next begins. The line, the reciprocal
// of the scale and the borders' true places are wrong by less than 2^-13 of a code, and a border
// lies up to 2^-11.8 above its true place.
constexpr float kDoubt = 0x1p-11f;
// Below this all is zero in both maps.
constexpr float kLeastShare = 0x1p-23f;

template <bool kSigned>
struct MomentLines {
    static constexpr const MomentMap& kMap = kSigned ? kWithSign : kWithoutSign;
    static constexpr int kZero = kSigned ? kZeroWithSign : 0;

    // From a code to its share. With f = the code's distance from zero's and this, the exponent of
    // f names the stretch, and its mantissa t in [1, 2) the place: share = (9 t - 8) * unit. The
    // exponent's low four bits index the units, kept as the sum of two floats.
    static constexpr float kShift = kSigned ? 0.5f : 1.5f;
    alignas(64) float unit[16] = {}, unit_rest[16] = {};

    // From the magnitude of a share to its code's distance from zero's, plus kDoubt. The exponent's
    // low five bits index `border`: the share from which on the next stretch's line is taken, a
    // little above the true border, where this stretch's line is a whole number. The stretch is in
    // the border's low four bits. The last code of a stretch reaches beyond the line's last step,
    // hence `last`.
    alignas(64) float border[32] = {};
    alignas(64) float slope[16] = {}, offset[16] = {}, last[16] = {};

    constexpr MomentLines() {
        constexpr double kUnit[] = {1e-7, 1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1};
        for (int decade = 0; decade < 7; ++decade) {
            const int stretch = decade + 1;
            set_unit(stretch, kUnit[decade]);
            const double codes = first_of(stretch + 1) - first_of(stretch);
            slope[stretch] = static_cast<float>(codes / 9 / kUnit[decade]);
            offset[stretch] = static_cast<float>(codes * 8 / 9 - (kSigned ? 0 : 1) + kDoubt);
        }
        const double one = first_of(kStretches - 1);
        set_unit(kStretches - 1, 1 / (1 + 9 / (2 * (one + (kSigned ? 0 : 1)))));
        // Through 0 and 1 where the stretch of zero ends; through a whole number where 1 begins.
        slope[0] = 1 / begin_of(1);
        offset[0] = kDoubt;
        const double steep = 0.9 / (1 - double{begin_of(kStretches - 1)});
        slope[kStretches - 1] = static_cast<float>(steep);
        offset[kStretches - 1] =
            static_cast<float>(one - steep * double{begin_of(kStretches - 1)} + kDoubt);
        for (int stretch = 0; stretch < kStretches; ++stretch)
            last[stretch] = static_cast<float>(first_of(stretch + 1)) - 0.5f;
        set_borders();
    }

private:
    // The distance from zero's code at which a stretch begins.
    static constexpr int first_of(int stretch) {
        if (stretch == 0) return 0;
        if (stretch == kStretches) return first_of(kStretches - 1) + 1;
        return kSigned ? 1 << (stretch - 1) : (1 << stretch) - 1;
    }

    static constexpr float begin_of(int stretch) { return kMap.begin[kZero + first_of(stretch)]; }

    constexpr void set_unit(int stretch, double value) {
        const float f = static_cast<float>(first_of(stretch)) + kShift;
        const uint32_t at = std::bit_cast<uint32_t>(f) >> 23 & 15;
        unit[at] = static_cast<float>(value);
        unit_rest[at] = static_cast<float>(value - double{unit[at]});
    }

    constexpr void set_borders() {
        int stretch = 0;
        for (uint32_t exponent = std::bit_cast<uint32_t>(kLeastShare) >> 23; exponent <= 127;
             ++exponent) {
            const auto end = std::bit_cast<float>((exponent + 1) << 23);
            uint32_t bits = std::bit_cast<uint32_t>(end);
            const int next = stretch + 1;
            const bool inside = next < kStretches && begin_of(next) < end;
            if (inside) {
                // At 1 the next stretch's line is the one that is whole: a little below.
                const uint32_t begin = std::bit_cast<uint32_t>(begin_of(next));
                bits = (next == kStretches - 1 ? begin - 24 : begin + 24) & ~15u;
            }
            border[exponent & 31] = std::bit_cast<float>(bits | static_cast<uint32_t>(stretch));
            if (inside) stretch = next;
        }
    }
};

template <bool kSigned>
inline constexpr MomentLines<kSigned> kMomentLines{};

}  // namespace ferry::optim
