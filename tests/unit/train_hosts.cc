// What ranks are told of the hosts that the configuration names.
#include <gtest/gtest.h>

#include <string>

#include "train/setup/rank_share.h"

namespace ferry::train {
namespace {

TEST(OneHostOfAllRanks, IsWarnedOfWhereSecondShardsAreAskedFor) {
    const auto said = [](int each, SecondShard shard, int ranks) {
        Config config;
        config.zero.stage = 3;
        config.zero.ranks_per_host = each;
        config.zero.secondary_shard = shard;
        testing::internal::CaptureStderr();
        warn_of_one_host(config, world_of(config, 0, ranks, ranks));
        return testing::internal::GetCapturedStderr();
    };
    const std::string all = said(4, SecondShard::node, 4);
    for (const char* part : {"zero.secondary_shard does nothing", "zero.ranks_per_host 4",
                             "all 4 ranks", "of each of several hosts"})
        EXPECT_NE(all.find(part), std::string::npos) << all;
    EXPECT_EQ(said(2, SecondShard::node, 4), "");
    EXPECT_EQ(said(4, SecondShard::none, 4), "");
    EXPECT_EQ(said(4, SecondShard::node, 1), "");  // a rank alone shares nothing
}

}  // namespace
}  // namespace ferry::train
