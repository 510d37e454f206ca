#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <limits>

#include "base/random.h"
#include "ferry/dtype.h"

namespace ferry {
namespace {

TEST(Philox, GivesThePublishedAnswers) {
    // Known-answer vectors of the Random123 distribution (philox4x32-10).
    EXPECT_EQ(philox({0, Purpose{0}}, {0, 0, 0, 0}),
              (std::array<uint32_t, 4>{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}));
    const uint32_t ones = 0xffffffff;
    EXPECT_EQ(philox({ones, Purpose{ones}}, {ones, ones, ones, ones}),
              (std::array<uint32_t, 4>{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}));
    EXPECT_EQ(
        philox({0xa4093822, Purpose{0x299f31d0}}, {0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}),
        (std::array<uint32_t, 4>{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}));
}

TEST(Philox, NormalHasUnitVariance) {
    double sum = 0, squares = 0;
    constexpr uint32_t kDraws = 20000;
    for (uint32_t i = 0; i < kDraws; ++i) {
        const double x = philox_normal({7, Purpose::test}, {i, 0, 0, 0});
        sum += x, squares += x * x;
    }
    EXPECT_NEAR(sum / kDraws, 0, 0.03);
    EXPECT_NEAR(squares / kDraws, 1, 0.04);
}

TEST(Half, EveryValueSurvivesTheRoundTrip) {
    for (uint32_t bits = 0; bits < 0x10000; ++bits) {
        const auto half = static_cast<uint16_t>(bits);
        const float wide = from_f16(half);
        if (std::isnan(wide)) {
            EXPECT_TRUE(std::isnan(from_f16(to_f16(wide))));
        } else {
            EXPECT_EQ(to_f16(wide), half) << bits;
        }
    }
}

TEST(Half, RoundsToNearestEven) {
    for (uint32_t bits = 0; bits < 0x7c00; ++bits) {
        const float low = from_f16(static_cast<uint16_t>(bits));
        // Infinity stands where the next half would be 2^16.
        const float high = bits == 0x7bff ? 65536.F : from_f16(static_cast<uint16_t>(bits + 1));
        const float middle = (low + high) / 2;  // exact: one more bit
        EXPECT_EQ(to_f16(middle), (bits & 1) ? bits + 1 : bits) << bits;
        EXPECT_EQ(to_f16(std::nextafter(middle, low)), bits) << bits;
        EXPECT_EQ(to_f16(std::nextafter(middle, high)), bits + 1) << bits;
    }
}

TEST(BFloat, RoundsToNearestEvenAndKeepsNan) {
    for (uint32_t bits = 0; bits < 0x7f80; ++bits) {
        const uint32_t wide = bits << 16;
        EXPECT_EQ(to_bf16(std::bit_cast<float>(wide)), bits);
        EXPECT_EQ(to_bf16(std::bit_cast<float>(wide | 0x7fff)), bits);
        EXPECT_EQ(to_bf16(std::bit_cast<float>(wide | 0x8000)), (bits & 1) ? bits + 1 : bits);
        EXPECT_EQ(to_bf16(std::bit_cast<float>(wide | 0x8001)), bits + 1);
    }
    EXPECT_TRUE(std::isnan(from_bf16(to_bf16(std::bit_cast<float>(0x7f800001u)))));
    EXPECT_TRUE(std::isnan(from_bf16(to_bf16(std::bit_cast<float>(0xffffffffu)))));
}

}  // namespace
}  // namespace ferry
