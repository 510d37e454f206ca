// Patterns of attention, as pictures: a line a row of blocks, '#' where a block is there.
#include "ops/patterns.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "ferry/error.h"

namespace ferry::ops {
namespace {

using Picture = std::vector<std::string>;

Picture picture(const BlockLists& lists, int64_t layout = 0) {
    Picture lines;
    for (int64_t row = 0; row < lists.blocks; ++row) {
        std::string line(static_cast<size_t>(lists.blocks), '.');
        for (const int32_t column : lists.keys_of(layout, row))
            line[static_cast<size_t>(column)] = '#';
        lines.push_back(line);
    }
    return lines;
}

BlockLists of_blocks(const Pattern& pattern, int64_t blocks, int64_t heads = 1, int64_t layer = 0) {
    return lists_of(pattern, blocks * pattern.block, heads, layer);
}

TEST(Patterns, dense_is_the_causal_mask) {
    const BlockLists lists = of_blocks({}, 3);
    EXPECT_EQ(picture(lists), (Picture{"#..", "##.", "###"}));
    EXPECT_EQ(lists.visible_blocks(), lists.causal_blocks());
}

TEST(Patterns, window_reaches_half_of_its_blocks_back) {
    EXPECT_EQ(picture(of_blocks({.kind = PatternKind::window, .num_sliding_window_blocks = 3}, 4)),
              (Picture{"#...", "##..", ".##.", "..##"}));
    EXPECT_EQ(picture(of_blocks({.kind = PatternKind::window, .num_sliding_window_blocks = 1}, 2)),
              (Picture{"#.", ".#"}));
    // Wider than the sequence: all of it.
    EXPECT_EQ(picture(of_blocks({.kind = PatternKind::window, .num_sliding_window_blocks = 99}, 2)),
              (Picture{"#.", "##"}));
}

TEST(Patterns, fixed_has_windows_and_the_last_blocks_of_each) {
    EXPECT_EQ(picture(of_blocks(
                  {.kind = PatternKind::fixed, .num_local_blocks = 3, .num_global_blocks = 1}, 8)),
              (Picture{"#.......", "##......", "###.....", "..##....", "..###...", "..####..",
                       "..#..##.", "..#..###"}));
    const Pattern heads{.kind = PatternKind::fixed,
                        .different_layout_per_head = true,
                        .num_local_blocks = 2,
                        .num_different_global_patterns = 2};
    EXPECT_EQ(of_blocks(heads, 4, 4).layouts, 2);  // heads 2 and 3 have those of 0 and 1
    EXPECT_EQ(of_blocks(heads, 4, 3).layouts, 3);  // each of so many heads its own
    EXPECT_EQ(picture(of_blocks(heads, 4, 3), 0), picture(of_blocks(heads, 4, 3), 2));
    EXPECT_EQ(picture(of_blocks(heads, 4, 4), 0), (Picture{"#...", "##..", ".##.", ".###"}));
    EXPECT_EQ(picture(of_blocks(heads, 4, 4), 1), (Picture{"#...", "##..", "#.#.", "#.##"}));
}

TEST(Patterns, longformer_has_a_window_and_global_rows_and_columns) {
    EXPECT_EQ(picture(of_blocks({.kind = PatternKind::longformer,
                                 .num_sliding_window_blocks = 1,
                                 .global_block_indices = {1, 4},
                                 .global_block_end_indices = {2, 6}},
                                6)),
              (Picture{"#.....", "##....", ".##...", ".#.#..", "#####.", "######"}));
    // A block that the sequence does not have is none.
    EXPECT_EQ(picture(of_blocks({.kind = PatternKind::longformer,
                                 .num_sliding_window_blocks = 1,
                                 .global_block_indices = {7}},
                                2)),
              (Picture{"#.", ".#"}));
}

TEST(Patterns, variable_has_windows_of_its_own_and_global_columns) {
    const Pattern plain{
        .kind = PatternKind::variable, .local_window_blocks = {1, 2}, .global_block_indices = {0}};
    EXPECT_EQ(picture(of_blocks(plain, 6)),
              (Picture{"#.....", "##....", "###...", "#..#..", "#..##.", "#....#"}));
    Pattern rows = plain;
    rows.bidirectional = rows.horizontal_global_attention = true;
    rows.global_block_indices = {4};
    EXPECT_EQ(picture(of_blocks(rows, 6)),
              (Picture{"#.....", ".#....", ".##...", "...#..", "#####.", "....##"}));
}

TEST(Patterns, bigbird_has_window_first_blocks_and_random_ones) {
    const Pattern p{.kind = PatternKind::bigbird, .num_random_blocks = 2, .seed = 5};
    const BlockLists lists = of_blocks(p, 40);
    for (int64_t row = 0; row < 40; ++row) {
        EXPECT_TRUE(lists.sees(0, row, 0));
        EXPECT_TRUE(lists.sees(0, row, row));
        EXPECT_TRUE(row == 0 || lists.sees(0, row, row - 1));
        EXPECT_LE(lists.keys_of(0, row).size(), 5U);
    }
    // Most random blocks are neither of the window nor the first.
    EXPECT_GT(lists.visible_blocks(), 40 * 3 + 40);
}

TEST(Patterns, heads_that_share_a_layout_find_it_alone_too) {
    const BlockLists all = of_blocks({.kind = PatternKind::fixed,
                                      .different_layout_per_head = true,
                                      .num_local_blocks = 3,
                                      .num_different_global_patterns = 3},
                                     9, 6);
    ASSERT_EQ(all.layouts, 3);
    for (const int64_t count : {1, 2, 3, 5}) {
        for (int64_t first = 0; first + count <= 6; ++first) {
            const BlockLists some = all.of_heads(first, count);
            EXPECT_EQ(some.layouts, std::min<int64_t>(count, 3));
            for (int64_t head = 0; head < count; ++head) {
                EXPECT_EQ(picture(some, head % some.layouts), picture(all, (first + head) % 3))
                    << first << " + " << head << " of " << count;
            }
        }
    }
}

TEST(Patterns, pairs_of_parts_are_those_of_the_whole) {
    const int64_t sequence = 10 * 64 - 17;
    const BlockLists lists = lists_of({.kind = PatternKind::bigbird,
                                       .different_layout_per_head = true,
                                       .num_random_blocks = 2,
                                       .seed = 9},
                                      sequence, 2, 0);
    for (const int64_t window : {0, 150}) {
        double pairs = 0;
        for (int64_t query = 0; query < sequence; query += 89) {
            for (int64_t key = 0; key < sequence; key += 89) {
                pairs += lists.visible_pairs({query, std::min<int64_t>(89, sequence - query)},
                                             {key, std::min<int64_t>(89, sequence - key)}, window);
            }
        }
        EXPECT_EQ(pairs, lists.visible_pairs(sequence, window));
    }
}

TEST(Patterns, random_blocks_follow_from_the_seed_the_head_and_the_layer) {
    Pattern p{.kind = PatternKind::bigbird, .num_random_blocks = 2, .seed = 5};
    const auto drawn = [&](int64_t layer = 0) { return of_blocks(p, 40, 2, layer); };
    const BlockLists first = drawn();
    EXPECT_EQ(first.layouts, 1);
    EXPECT_EQ(first.columns, drawn().columns);
    EXPECT_EQ(first.columns, drawn(1).columns);
    p.different_layout_per_layer = true;
    EXPECT_EQ(first.columns, drawn(0).columns);
    EXPECT_NE(first.columns, drawn(1).columns);
    p.different_layout_per_head = true;
    const BlockLists heads = drawn();
    EXPECT_EQ(heads.layouts, 2);
    EXPECT_EQ(picture(heads, 0), picture(first));
    EXPECT_NE(picture(heads, 0), picture(heads, 1));
    p.seed = 6;
    EXPECT_NE(heads.columns, drawn().columns);
}

TEST(Patterns, of_bidirectional_settings_lose_what_is_behind) {
    Pattern p{.kind = PatternKind::bigbird, .num_random_blocks = 4};
    const int64_t whole = of_blocks(p, 64).visible_blocks();
    p.bidirectional = true;
    const BlockLists cut = of_blocks(p, 64);
    EXPECT_LT(cut.visible_blocks(), whole);
    for (int64_t row = 0; row < 64; ++row) EXPECT_LE(cut.keys_of(0, row).back(), row);
}

TEST(Patterns, of_small_blocks_are_widened) {
    // Of 16 tokens each: a row and the one before it; four rows are a block of 64.
    const Pattern p{.kind = PatternKind::window, .block = 16, .num_sliding_window_blocks = 3};
    const BlockLists lists = lists_of(p, 200, 1, 0);
    EXPECT_EQ(lists.block, 64);
    EXPECT_EQ(picture(lists), (Picture{"#...", "##..", ".##.", "..##"}));
    const Pattern far{.kind = PatternKind::longformer,
                      .block = 32,
                      .num_sliding_window_blocks = 1,
                      .global_block_indices = {3}};
    EXPECT_EQ(picture(lists_of(far, 256, 1, 0)), (Picture{"#...", "##..", ".##.", ".#.#"}));
}

TEST(Patterns, are_transposed_and_their_pairs_counted) {
    const Pattern p{.kind = PatternKind::fixed,
                    .different_layout_per_head = true,
                    .num_local_blocks = 2,
                    .num_different_global_patterns = 2};
    const BlockLists lists = lists_of(p, 300, 2, 0);  // the last block has 44 tokens
    EXPECT_EQ(lists.rows.size(), lists.columns.size());
    double pairs = 0, near = 0;
    for (int64_t head = 0; head < 2; ++head) {
        for (int64_t key = 0; key < lists.blocks; ++key) {
            int32_t last = -1;
            for (const int32_t query : lists.queries_of(head, key)) {
                EXPECT_TRUE(lists.sees(head, query, key));
                EXPECT_GT(query, last);
                last = query;
            }
        }
        for (int64_t q = 0; q < 300; ++q) {
            for (int64_t k = 0; k <= q; ++k) {
                if (!lists.sees(head, q / 64, k / 64)) continue;
                pairs += 1;
                near += k > q - 70 ? 1 : 0;
            }
        }
    }
    EXPECT_EQ(lists.visible_pairs(300), pairs);
    EXPECT_EQ(lists.visible_pairs(300, 70), near);
}

void expect_refused(const Pattern& p, int64_t blocks, int64_t heads, const std::string& where,
                    const std::string& what) {
    try {
        of_blocks(p, blocks, heads);
        ADD_FAILURE() << "not refused: " << what;
    } catch (const Error& error) {
        EXPECT_EQ(error.trouble(), Trouble::usage);
        EXPECT_NE(error.problem().where.find(where), std::string::npos) << error.what();
        EXPECT_NE(error.problem().what.find(what), std::string::npos) << error.what();
    }
}

TEST(Patterns, that_contradict_themselves_or_the_sequence_are_refused) {
    expect_refused({.kind = PatternKind::bigbird, .num_random_blocks = 9}, 8, 1,
                   "attention.num_random_blocks", "more random blocks than there are");
    expect_refused({.kind = PatternKind::bigbird, .num_global_blocks = 9}, 8, 1,
                   "attention.num_global_blocks", "more global blocks");
    expect_refused({.kind = PatternKind::fixed, .num_local_blocks = 4, .num_global_blocks = 3}, 8,
                   1, "attention.num_global_blocks", "no whole number");
    expect_refused({.kind = PatternKind::fixed, .num_different_global_patterns = 2}, 8, 1,
                   "attention.num_different_global_patterns", "one layout for all heads");
    expect_refused({.kind = PatternKind::fixed,
                    .different_layout_per_head = true,
                    .num_different_global_patterns = 5},
                   8, 1, "attention.num_different_global_patterns", "more global patterns");
    expect_refused({.kind = PatternKind::fixed, .horizontal_global_attention = true}, 8, 1,
                   "attention.horizontal_global_attention", "bidirectional");
    expect_refused({.kind = PatternKind::longformer, .global_block_end_indices = {1, 2}}, 8, 1,
                   "attention.global_block_end_indices", "not as many ends");
    expect_refused({.kind = PatternKind::variable, .global_block_end_indices = {0}}, 8, 1,
                   "attention.global_block_end_indices[0]", "ends before it begins");
}

Pattern drawn(int64_t layers, int64_t heads, const std::vector<std::string>& rows) {
    auto layout = std::make_shared<PatternLayout>();
    *layout = {.where = "drawn.layout",
               .block = 64,
               .layers = layers,
               .heads = heads,
               .side = std::ssize(rows) / layers / heads};
    for (const std::string& row : rows)
        for (const char cell : row) layout->cells.push_back(cell == '#');
    return {.kind = PatternKind::layout, .layout = layout};
}

TEST(Patterns, of_a_layout_are_as_it_is_drawn) {
    const Pattern p = drawn(1, 2, {"#..", ".#.", "#.#", "#..", "##.", ".##"});
    const BlockLists lists = of_blocks(p, 3, 2);
    EXPECT_EQ(picture(lists, 0), (Picture{"#..", ".#.", "#.#"}));
    EXPECT_EQ(picture(lists, 1), (Picture{"#..", "##.", ".##"}));
    EXPECT_EQ(picture(of_blocks(p, 2, 2), 1), (Picture{"#.", "##"}));  // of shorter sequences
    const Pattern layers = drawn(2, 1, {"#.", "##", "#.", ".#"});
    EXPECT_EQ(picture(of_blocks(layers, 2, 4, 0)), (Picture{"#.", "##"}));
    EXPECT_EQ(picture(of_blocks(layers, 2, 4, 1)), (Picture{"#.", ".#"}));
}

TEST(Patterns, of_a_layout_that_does_not_fit_are_refused) {
    const Pattern p = drawn(1, 2, {"#.", "##", "#.", ".#"});
    expect_refused(p, 3, 2, "attention.layout: drawn.layout", "too small");
    expect_refused(p, 2, 3, "attention.layout: drawn.layout", "other heads");
    EXPECT_THROW(of_blocks(drawn(2, 1, {"#.", "##", "#.", ".#"}), 2, 1, 2), Error);
}

TEST(Patterns, with_a_row_that_has_no_block_are_refused_unless_it_is_asked_for) {
    Pattern p = drawn(1, 2, {"#..", "##.", "..#", "#..", "...", "###"});
    expect_refused(p, 3, 2, "layer 0, head 1, row 1", "no block");
    p.allow_empty_rows = true;
    EXPECT_EQ(picture(of_blocks(p, 3, 2), 1), (Picture{"#..", "...", "###"}));
}

}  // namespace
}  // namespace ferry::ops
