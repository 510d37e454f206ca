#include <gtest/gtest.h>

#include <algorithm>

#include "ferry/pinned_mem.h"

namespace ferry::pinned_mem {
namespace {

class PoolTest : public testing::Test {
protected:
    Topology topology_ = [] {
        Topology made;
        made.memory_limit_bytes = 64 * kMiB;
        made.nodes = {{.os_index = 0, .cores = {0}}, {.os_index = 1, .cores = {1}}};
        return made;
    }();
    NodeTeams teams_{topology_, 2};
};

TEST_F(PoolTest, SlabsAreAlignedZeroAndCounted) {
    Pool pool(topology_, 16 * kMiB);
    const auto a = pool.reserve("a", 5 * kMiB + 123, teams_);
    const auto b = pool.reserve("b", 4096, teams_);
    EXPECT_EQ(reinterpret_cast<uintptr_t>(a.data()) % (2 * kMiB), 0u);
    EXPECT_EQ(a.size(), static_cast<size_t>(5 * kMiB + 123));
    EXPECT_TRUE(std::all_of(a.begin(), a.end(), [](std::byte x) { return x == std::byte{0}; }));
    EXPECT_EQ(pool.reserved_bytes(), 5 * kMiB + 123 + 4096);
    ASSERT_EQ(pool.slabs().size(), 2u);
    EXPECT_EQ(pool.slabs()[1].name, "b");
    EXPECT_NE(a.data(), b.data());
    EXPECT_TRUE(pool.reserve("nothing", 0, teams_).empty());
}

TEST_F(PoolTest, TheBudgetAndTheMachineAreLimits) {
    Pool pool(topology_, 8 * kMiB);
    pool.reserve("a", 8 * kMiB, teams_);
    EXPECT_THROW(pool.reserve("b", 1, teams_), Error);
    Pool large(topology_, kGiB);
    try {
        large.reserve("c", 65 * kMiB, teams_);
        FAIL();
    } catch (const Error& error) {
        EXPECT_EQ(error.trouble(), Trouble::does_not_fit);
        EXPECT_NE(std::string(error.what()).find("64.00 MiB"), std::string::npos);
    }
}

TEST_F(PoolTest, NothingIsReservedOnceSealed) {
    Pool pool(topology_, 8 * kMiB);
    pool.seal();
    EXPECT_DEATH(pool.reserve("late", 1, teams_), "sealed");
}

}  // namespace
}  // namespace ferry::pinned_mem
