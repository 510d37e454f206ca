#include <gtest/gtest.h>

#include <vector>

#include "cost/drives.h"

namespace ferry::cost {
namespace {

TEST(Drives, PathsOfOneAreAsFastAsItIs) {
    const Path one{.bytes_per_s = 3e9, .drive = 7, .at_once = 4};
    const Path other{.bytes_per_s = 1e9, .drive = 8, .in_memory = true, .cores_per_byte = 1e-9};
    const Path nowhere{.bytes_per_s = 1e9};
    const std::vector<Path> twice{one, one, other};
    EXPECT_EQ(one_drive(twice).bytes_per_s, 4e9);
    EXPECT_EQ(one_drive(twice).at_once, 5);
    EXPECT_EQ(one_drive(twice).dram_per_byte, (3 + 2 * 1) / 4.0);
    EXPECT_EQ(one_drive(twice).cores_per_byte, 1e-9 / 4);
    EXPECT_EQ(path_rates(twice), (std::vector<double>{1.5e9, 1.5e9, 1e9}));
    const std::vector<Path> unknown{nowhere, nowhere, nowhere};
    EXPECT_EQ(one_drive(unknown).bytes_per_s, 3e9) << "they may be three";
    EXPECT_EQ(one_drive({}).bytes_per_s, 0);
}

// 8 GB on two alike: where one holds 2, the other has to hold, and to move, 6.
TEST(Drives, TheFullestIsTheLast) {
    std::vector<Path> paths{{.bytes_per_s = 1e9, .drive = 1, .size_bytes = 2'000'000'000},
                            {.bytes_per_s = 1e9, .drive = 2}};
    EXPECT_DOUBLE_EQ(one_drive(paths, 8'000'000'000).bytes_per_s, 1e9 / 0.75);
    EXPECT_DOUBLE_EQ(one_drive(paths, 4'000'000'000).bytes_per_s, 2e9);
    paths[1].drive = 1;  // one drive holds all of it, whichever path is full
    EXPECT_DOUBLE_EQ(one_drive(paths, 8'000'000'000).bytes_per_s, 1e9);
}

}  // namespace
}  // namespace ferry::cost
