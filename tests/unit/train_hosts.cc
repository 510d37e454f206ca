// What ranks are told of the hosts that the configuration names.
#include <gtest/gtest.h>

#include <string>

#include "train/setup/rank_share.h"

namespace ferry::train {
namespace {

TEST(OneHostOfAllRanks, IsWarnedOfWhereSecondShardsOrLevelsAreAskedFor) {
    const auto said = [](int each, SecondShard shard, int ranks,
                         CodecKind gradients = CodecKind::none) {
        Config config;
        config.zero.stage = 3;
        config.zero.ranks_per_host = each;
        config.zero.second_shard = shard;
        config.zero.compress.gradients = gradients;
        testing::internal::CaptureStderr();
        warn_of_one_host(config, world_of(config, 0, ranks, ranks));
        return testing::internal::GetCapturedStderr();
    };
    const std::string all = said(4, SecondShard::host, 4);
    for (const char* part : {"zero.second_shard does nothing", "zero.ranks_per_host 4",
                             "all 4 ranks", "of each of several hosts"})
        EXPECT_NE(all.find(part), std::string::npos) << all;
    const std::string levels = said(4, SecondShard::none, 4, CodecKind::int8);
    EXPECT_NE(levels.find("zero.ranks_per_host does nothing"), std::string::npos) << levels;
    EXPECT_NE(levels.find("one level"), std::string::npos) << levels;
    EXPECT_NE(said(4, SecondShard::host, 4, CodecKind::int8).find("one level"), std::string::npos);
    EXPECT_EQ(said(2, SecondShard::none, 4, CodecKind::int8), "");
    EXPECT_EQ(said(1, SecondShard::none, 4, CodecKind::int8), "");  // nobody asks for levels
    EXPECT_EQ(said(2, SecondShard::host, 4), "");
    EXPECT_EQ(said(4, SecondShard::none, 4), "");
    EXPECT_EQ(said(4, SecondShard::host, 1), "");  // a rank alone shares nothing
}

}  // namespace
}  // namespace ferry::train
