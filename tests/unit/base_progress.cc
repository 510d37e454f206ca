#include "base/progress.h"

#include <gtest/gtest.h>

#include "ferry/units.h"

namespace ferry {
namespace {

TEST(Progress, SaysBytesRateAndTimeLeft) {
    EXPECT_EQ(progress_text(kGiB, 4 * kGiB, 2), "1.00 GiB of 4.00 GiB (25 %), 0.54 GB/s, 6 s left");
    EXPECT_EQ(progress_text(kGiB, 101 * kGiB, 1),
              "1.00 GiB of 101.00 GiB (1 %), 1.07 GB/s, 1 min 40 s left");
    EXPECT_EQ(progress_text(kGiB, 3601 * kGiB, 2),
              "1.00 GiB of 3.52 TiB (0 %), 0.54 GB/s, 2 h 00 min left");
}

TEST(Progress, IsOfWhatIsDoneAtTheEnd) {
    EXPECT_EQ(progress_text(4 * kGiB, 4 * kGiB, 2), "4.00 GiB of 4.00 GiB (100 %), 2.15 GB/s");
}

TEST(Progress, KnowsNoRateBeforeTheFirstByte) {
    EXPECT_EQ(progress_text(0, kGiB, 0), "0 B of 1.00 GiB (0 %)");
    EXPECT_EQ(progress_text(0, 0, 0), "0 B of 0 B (100 %)");
}

}  // namespace
}  // namespace ferry
