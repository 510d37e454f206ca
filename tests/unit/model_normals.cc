#include <gtest/gtest.h>
#include <hwy/targets.h>

#include <vector>

#include "model/normals.h"

namespace ferry::model {
namespace {

constexpr PhiloxKey kKey{11, Purpose::test};
constexpr uint64_t kSite = 0x123456789abcdef0;

float alone(uint64_t element) {
    return philox_normal(kKey,
                         {static_cast<uint32_t>(element >> 32), static_cast<uint32_t>(kSite >> 32),
                          static_cast<uint32_t>(kSite), static_cast<uint32_t>(element)});
}

TEST(Normals, AreThoseOfOneCounterAtATimeOnEveryTarget) {
    constexpr size_t kCount = size_t{1} << 21;
    std::vector<float> made(kCount), want(kCount);
    for (size_t i = 0; i < kCount; ++i) want[i] = alone(i);
    for (int64_t all = hwy::SupportedTargets(), rest = all; rest != 0; rest &= rest - 1) {
        const int64_t target = rest & -rest;
        hwy::SetSupportedTargetsForTest(target);
        hwy::GetChosenTarget().Update(target);
        philox_normals(kKey, kSite, 0, made);
        EXPECT_EQ(made, want) << hwy::TargetName(target);
    }
    hwy::SetSupportedTargetsForTest(0);
    hwy::GetChosenTarget().Update(hwy::SupportedTargets());
}

// Where the counter's low word ends, and in runs that no vector divides.
TEST(Normals, ArePlacedByTheirElement) {
    for (const uint64_t first : {uint64_t{0}, uint64_t{3}, (uint64_t{1} << 32) - 7}) {
        for (size_t count = 0; count < 20; ++count) {
            std::vector<float> made(count + 1, -77);
            philox_normals(kKey, kSite, first, std::span(made).first(count));
            for (size_t i = 0; i < count; ++i) EXPECT_EQ(made[i], alone(first + i)) << first << i;
            EXPECT_EQ(made[count], -77);
        }
    }
}

}  // namespace
}  // namespace ferry::model
