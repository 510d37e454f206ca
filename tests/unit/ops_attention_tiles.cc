// The tiles of a backward attention cover each pair of query and key that sees it, once.
#include "ops/attention_tiles.h"

#include <gtest/gtest.h>

#include <set>
#include <tuple>
#include <vector>

namespace ferry::ops {
namespace {

Attention shape_of(int64_t sequence, int64_t heads, int64_t kv_heads, int64_t window = 0) {
    return {.sequences = 1,
            .sequence = sequence,
            .heads = heads,
            .kv_heads = kv_heads,
            .head_dim = 64,
            .scale = 1,
            .type = DType::bf16,
            .window = window};
}

std::vector<AttentionTile> all_of(const AttentionTiles& tiles) {
    std::vector<AttentionTile> found;
    for (int64_t strip = 0; strip < tiles.strips(); ++strip)
        for (int64_t i = 0; i < tiles.tiles(strip); ++i) found.push_back(tiles.tile(strip, i));
    return found;
}

// Whether the graph of a tile lets a query see a key, in the sequence's own places.
bool sees(const AttentionTile& t, const Attention& s, int64_t query, int64_t key) {
    if (query < t.query || query >= t.query + t.queries) return false;
    if (key < t.key || key >= t.key + t.keys) return false;
    if (!t.causal) return true;
    const int64_t diagonal = query - t.query + t.keys - t.queries;  // the last key it sees
    const int64_t at = key - t.key;
    return at <= diagonal && (s.window == 0 || at > diagonal - s.window);
}

TEST(AttentionTiles, cover_each_pair_that_is_seen_once) {
    for (const Attention& s : {shape_of(129, 1, 1), shape_of(700, 1, 1), shape_of(641, 3, 1),
                               shape_of(900, 8, 2), shape_of(700, 4, 1, 1), shape_of(700, 4, 1, 90),
                               shape_of(641, 3, 3, 129), shape_of(700, 2, 2, 500)}) {
        const AttentionTiles tiles(s, 256 * kKiB);
        const std::vector<AttentionTile> all = all_of(tiles);
        for (int64_t q = 0; q < s.sequence; ++q) {
            for (int64_t k = 0; k < s.sequence; ++k) {
                int times = 0;
                for (const AttentionTile& t : all) times += sees(t, s, q, k) ? 1 : 0;
                const bool wanted = k <= q && k >= s.first_key(q);
                ASSERT_EQ(times, wanted ? 1 : 0)
                    << s.sequence << " tokens, window " << s.window << ": " << q << " sees " << k;
            }
        }
    }
}

TEST(AttentionTiles, keep_to_the_limit_and_to_what_they_say) {
    for (const Attention& s :
         {shape_of(11648, 32, 8), shape_of(32768, 32, 8), shape_of(131072, 32, 8),
          shape_of(23300, 10, 10), shape_of(131072, 24, 8), shape_of(8320, 8, 1),
          shape_of(131072, 128, 2), shape_of(131072, 32, 8, 4096), shape_of(65536, 16, 1, 40000)}) {
        SCOPED_TRACE(testing::Message() << s.sequence << " tokens, heads " << s.heads << "/"
                                        << s.kv_heads << ", window " << s.window);
        const AttentionTiles tiles(s, kGiB);
        EXPECT_GT(tiles.strips(), 1);
        EXPECT_EQ(s.kv_heads % tiles.kv_heads(), 0);
        for (const AttentionTile& t : all_of(tiles)) {
            EXPECT_LE(slope_bytes(s.heads / s.kv_heads * tiles.kv_heads(), t.queries, t.keys),
                      kGiB);
            EXPECT_LE(t.queries, tiles.most_queries());
            EXPECT_LE(t.keys, tiles.most_keys());
            EXPECT_EQ(t.query % 128, 0);
            EXPECT_EQ(t.key % 128, 0);
        }
    }
}

// cuDNN has no kernel for one query and one key.
TEST(AttentionTiles, are_never_one_pair) {
    const Attention odd = shape_of(641, 3, 1);
    const AttentionTiles tiles(odd, 256 * kKiB);
    ASSERT_EQ(odd.sequence % tiles.most_queries(), 1) << "the last strip is of one query";
    for (const AttentionTile& t : all_of(tiles)) {
        EXPECT_GT(t.queries * t.keys, 1);
        EXPECT_LE(t.keys, tiles.most_keys());
    }
}

// A kernel is built for each: seconds of a start, were there many.
TEST(AttentionTiles, have_few_shapes) {
    const auto shapes = [](const Attention& s) {
        std::set<std::tuple<int64_t, int64_t, bool>> found;
        for (const AttentionTile& t : all_of(AttentionTiles(s, kGiB)))
            found.emplace(t.queries, t.keys, t.causal);
        return found.size();
    };
    EXPECT_EQ(shapes(shape_of(32768, 32, 8)), 2U);
    EXPECT_EQ(shapes(shape_of(131072, 32, 8)), 2U);
    EXPECT_LE(shapes(shape_of(100000, 32, 8)), 4U);
    EXPECT_LE(shapes(shape_of(131072, 32, 8, 4096)), 2U);
}

}  // namespace
}  // namespace ferry::ops
