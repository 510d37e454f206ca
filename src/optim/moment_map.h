// The two maps from codes to shares of a block's scale, and the arithmetic that goes from a code to
// a moment and from a moment to a code (ferry/optim.h). The CPU and the GPU read the same
// constants.
//
// Shares are seven decades below 1, each a line: equal steps, a fifth as many a share as in the
// decade below. With 0 and 1 they are nine stretches, numbered by magnitude. So a moment is one
// multiply-add of its code, and a code one multiply-add of its moment; which, a stretch says.
#pragma once

#include <bit>
#include <cstdint>

namespace ferry::optim {

constexpr int kCodes = 256;
constexpr int kStretches = 9;
// The least scale of a moment block.
constexpr float kLeastScale = 1e-12f;
// A scale above this is hardly a float's reciprocal: scale and moments are then taken times
// kShrink.
constexpr float kLargeScale = 0x1p100f, kShrink = 0x1p-40f;
// The code of a share of 0, in the map with signs; in the other it is 0.
constexpr uint8_t kZeroWithSign = 127;
// Codes of a block that is not finite: they stand for a share of 1.
constexpr uint8_t kNotFinite = 255;
// Added to a share before its code is looked for. Zero then has an exponent like any other.
constexpr float kShareShift = 0x1p-23f;
// What code 0 of the map without signs stands for, so that no root is of a denormal.
constexpr float kLeastSquare = 0x1p-126f;

// The float `steps` further from zero.
constexpr float stepped(float value, int steps) {
    return std::bit_cast<float>(std::bit_cast<uint32_t>(value) + static_cast<uint32_t>(steps));
}

// With d a code's distance from zero's, and x = |moment| / scale + kShareShift:
//   moment = place * (rise * scale) - base * scale     place = 4 d with a sign, d + 1 without one
//   d = floor(x * slope + offset), below the next stretch's first
// each a fused multiply-add. A place's exponent is the stretch's number and a constant.
struct MomentMap {
    bool has_sign;
    float share[kCodes] = {};  // in ascending order
    float rise[kStretches] = {}, base[kStretches] = {};
    float slope[kStretches] = {}, offset[kStretches] = {};
    // The x from which on a stretch is left, a number whose last four bits are the stretch's.
    float border[kStretches - 1] = {};
    float begin[kCodes] = {};  // by d: the least x whose code it is; of d = 0 unused

    constexpr explicit MomentMap(bool with_sign) : has_sign(with_sign) {
        set_shares();
        for (int stretch = 1; stretch <= 7; ++stretch) set_decade(stretch);
        // 0 and 1 are single codes.
        const int last = kStretches - 1;
        offset[0] = 0.5f;
        offset[last] = static_cast<float>(first_of(last)) + 0.5f;
        rise[last] = 1.0f / static_cast<float>(has_sign ? 4 * first_of(last) : first_of(last) + 1);
        for (int stretch = 0; stretch < last; ++stretch) set_border(stretch);
        set_begins();
    }

    constexpr int zero() const { return has_sign ? int{kZeroWithSign} : 0; }
    // The distance from zero's code at which a stretch begins; beyond the last one, too.
    constexpr int first_of(int stretch) const {
        if (stretch == 0) return 0;
        if (stretch == kStretches) return first_of(kStretches - 1) + 1;
        return has_sign ? 1 << (stretch - 1) : (1 << stretch) - 1;
    }
    // The float that floor() makes a stretch's last d of.
    constexpr float last_of(int stretch) const {
        return static_cast<float>(first_of(stretch + 1)) - 0.5f;
    }

private:
    static constexpr double kUnit[] = {0, 1e-7, 1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1};

    // Seven decades, each cut into equal intervals of which a code is the middle: into twice as
    // many as the decade below. Then 0 and 1.
    constexpr void set_shares() {
        float* below_zero = share + zero();
        float* above_zero = below_zero;
        *above_zero++ = 0;
        for (int stretch = 1; stretch <= 7; ++stretch) {
            const int intervals = first_of(stretch + 1) - first_of(stretch);
            for (int i = 0; i < intervals; ++i) {
                const double middle = 0.1 + 0.9 * (2 * i + 1) / (2 * intervals);
                *above_zero = static_cast<float>(10 * kUnit[stretch] * middle);
                if (has_sign) *--below_zero = -*above_zero;
                ++above_zero;
            }
        }
        *above_zero = 1;
    }

    constexpr void set_decade(int stretch) {
        const double codes = first_of(stretch + 1) - first_of(stretch), unit = kUnit[stretch];
        rise[stretch] = static_cast<float>(9 * unit / codes / (has_sign ? 4 : 1));
        base[stretch] = static_cast<float>((8 - 4.5 / codes) * unit);
        slope[stretch] = static_cast<float>(codes / (9 * unit));
        // Right in the middle.
        const double middle = first_of(stretch) + codes / 2;
        const double x = 5.5 * unit + double{kShareShift};
        offset[stretch] = static_cast<float>(middle - double{slope[stretch]} * x);
    }

    constexpr void set_border(int stretch) {
        const int above = zero() + first_of(stretch + 1);
        const double middle = (double{share[above - 1]} + double{share[above]}) / 2;
        const float x = static_cast<float>(middle + double{kShareShift});
        const auto number = static_cast<uint32_t>(stretch);
        const uint32_t bits = (std::bit_cast<uint32_t>(x) - number + 8) & ~15u;
        border[stretch] = std::bit_cast<float>(bits | number);
    }

    // Rounded once: within a stretch the sum takes 53 bits at most.
    constexpr float line(int stretch, float x) const {
        return static_cast<float>(double{x} * double{slope[stretch]} + double{offset[stretch]});
    }

    constexpr void set_begins() {
        for (int stretch = 1; stretch < kStretches; ++stretch) {
            const int first = first_of(stretch);
            begin[first] = border[stretch - 1];
            for (int d = first + 1; d < first_of(stretch + 1); ++d) {
                const auto goal = static_cast<float>(d);
                float x =
                    static_cast<float>((d - double{offset[stretch]}) / double{slope[stretch]});
                while (line(stretch, stepped(x, -1)) >= goal) x = stepped(x, -1);
                while (line(stretch, x) < goal) x = stepped(x, 1);
                begin[d] = x;
            }
        }
    }
};

// Whoever codes moments without these lines takes the nearest share: the Python package's
// optimizer, when it loads moments in fp32. Codes then differ within 2^-12 of a step of half way.
constexpr MomentMap kWithSign{true}, kWithoutSign{false};

}  // namespace ferry::optim
