// What a configuration makes of attention: the model's patterns, and what they cost and change.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <filesystem>
#include <fstream>

#include "cost/traffic.h"
#include "ferry/error.h"
#include "tests/support/temporary_directory.h"
#include "tests/support/tiny_run.h"
#include "train/setup/model_of.h"
#include "train/setup/numerics_record.h"

namespace ferry::train {
namespace {

using testing::HasSubstr;
using testing::Not;

class AttentionOf : public testing::Test {
protected:
    AttentionOf() {
        config_.model.layers = 3;
        config_.model.heads = 4;
        config_.batch.sequence = 320;
        config_.attention.pattern = AttentionPattern::window;
    }
    model::Shape shape() const { return model_of(config_).shape; }
    std::string record() const { return numerics_text(config_, shape(), "a machine", 1); }

    TinyData data_;
    Config config_ = tiny_config(data_);
};

TEST_F(AttentionOf, layers_that_are_named_have_the_pattern_and_share_its_lists) {
    const model::Shape all = shape();
    ASSERT_EQ(all.patterns.size(), 3U);
    EXPECT_NE(all.pattern_of(0), nullptr);
    EXPECT_EQ(all.patterns[0], all.patterns[2]);
    config_.attention.layers = {1};
    const model::Shape one = shape();
    EXPECT_EQ(one.pattern_of(0), nullptr);
    EXPECT_NE(one.pattern_of(1), nullptr);
    config_.attention.pattern = AttentionPattern::dense;
    EXPECT_TRUE(shape().patterns.empty());
}

TEST_F(AttentionOf, layers_with_random_blocks_of_their_own_have_lists_of_their_own) {
    config_.attention.pattern = AttentionPattern::bigbird;
    config_.attention.num_random_blocks = 2;
    config_.attention.num_sliding_window_blocks = 1;
    EXPECT_EQ(shape().patterns[0]->columns, shape().patterns[2]->columns);
    config_.attention.different_layout_per_layer = true;
    const model::Shape own = shape();
    EXPECT_NE(own.patterns[0], own.patterns[1]);
    EXPECT_NE(own.patterns[0]->columns, own.patterns[1]->columns);
}

TEST_F(AttentionOf, keys_that_a_query_sees_are_counted_block_by_block) {
    // Rows of 64 tokens: the first sees its own block, the others one more.
    const double pairs = 5 * (64.0 * 65 / 2) + 4 * 64.0 * 64;
    EXPECT_DOUBLE_EQ(cost::keys_seen(shape(), 320, 0), pairs / 320);
    config_.attention.layers = {1};
    EXPECT_DOUBLE_EQ(cost::keys_seen(shape(), 320, 0), 160);  // as it is counted without a pattern
    EXPECT_DOUBLE_EQ(cost::keys_seen(shape(), 320, 1), pairs / 320);
}

TEST_F(AttentionOf, the_record_names_the_mask) {
    const std::string window = record();
    EXPECT_THAT(window, HasSubstr(" pattern window "));
    EXPECT_THAT(window, Not(HasSubstr("documents")));
    config_.attention.num_sliding_window_blocks = 5;
    EXPECT_NE(record(), window);
    config_.attention.num_sliding_window_blocks = 3;
    EXPECT_EQ(record(), window);
    config_.attention.layers = {0, 2};
    EXPECT_NE(record(), window);
    config_.attention.pattern = AttentionPattern::dense;
    EXPECT_THAT(record(), Not(HasSubstr("pattern")));
    config_.data.isolate_documents = true;
    EXPECT_THAT(record(), HasSubstr("documents isolated"));
}

// The same lists by another road are the same run.
TEST_F(AttentionOf, the_record_is_of_the_lists) {
    config_.attention.num_sliding_window_blocks = 3;
    const std::string three = record();
    config_.attention.num_sliding_window_blocks = 2;  // half of it counts
    EXPECT_EQ(record(), three);
}

// Heads that share a layout and heads that have one each, of the same blocks.
TEST_F(AttentionOf, the_record_does_not_say_how_often_a_layout_is_kept) {
    config_.attention = {.pattern = AttentionPattern::fixed,
                         .different_layout_per_head = true,
                         .num_local_blocks = 2,
                         .num_different_global_patterns = 2};
    const auto shared = shape().patterns[0];
    ASSERT_EQ(shared->layouts, 2);
    const std::string fixed = record();
    const TemporaryDirectory directory;
    const std::filesystem::path file = directory / "drawn.layout";
    std::ofstream out(file, std::ios::binary);
    const std::array<uint32_t, 6> header{1, 64, 1, 4, 5, 5};
    out.write("FERRYLAY", 8);
    out.write(reinterpret_cast<const char*>(header.data()), sizeof header);
    for (int64_t head = 0; head < 4; ++head) {
        for (int64_t row = 0; row < 5; ++row) {
            for (int64_t column = 0; column < 5; ++column)
                out.put(shared->sees(head % 2, row, column) ? 1 : 0);
        }
    }
    out.close();
    config_.attention = {.pattern = AttentionPattern::layout, .layout = file.string()};
    ASSERT_EQ(shape().patterns[0]->layouts, 4);
    std::string drawn = record();
    const size_t word = drawn.find("layout ");
    ASSERT_NE(word, std::string::npos);
    EXPECT_EQ(drawn.replace(word, 6, "fixed"), fixed);
}

TEST_F(AttentionOf, the_device_s_memory_counts_each_list_once) {
    const auto ops = ops::make_reference_ops();
    const auto bytes = [&] { return decoder_of(config_, 1, *ops).pattern_bytes(); };
    const int64_t one = round_up(shape().patterns[0]->memory_bytes(), 64);
    EXPECT_EQ(bytes(), one);
    config_.attention.pattern = AttentionPattern::bigbird;
    config_.attention.different_layout_per_layer = true;
    int64_t all = 0;
    for (const auto& lists : shape().patterns) all += round_up(lists->memory_bytes(), 64);
    EXPECT_EQ(bytes(), all);
    config_.attention.pattern = AttentionPattern::dense;
    EXPECT_EQ(bytes(), 0);
}

}  // namespace
}  // namespace ferry::train
