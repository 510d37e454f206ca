// How a GPU's backward attention goes over a sequence whose slopes do not fit: by strips of
// queries, each tile by tile over the keys. A slope is the gradient of one score; the deterministic
// kernel keeps those of a whole call, 2 B for each pair of query and key.
#pragma once

#include <cstdint>

#include "ferry/units.h"
#include "ops/ops.h"

namespace ferry::ops {

// One call's part of a sequence: queries [query, query + queries), keys [key, key + keys).
struct AttentionTile {
    int64_t query = 0, queries = 0, key = 0, keys = 0;
    // The last query sees the last key, each query before it one less; a window bounds them from
    // the other side. Else every query sees every key.
    bool causal = false;
};

// Bytes of slopes that a call keeps, as cuDNN pads them.
int64_t slope_bytes(int64_t heads, int64_t queries, int64_t keys);

// A function of shape and limit alone: sums are in the order of the tiles.
//
// Without a window tiles are squares. So there are few shapes of them, however long the sequence;
// cuDNN builds a kernel for each. With a window a strip is one tile, of the keys that it sees.
class AttentionTiles {
public:
    // most_bytes: of a call's slopes.
    AttentionTiles(const Attention& shape, int64_t most_bytes);

    int64_t strips() const { return ceil_div(shape_.sequence, most_queries_); }
    // The tiles of a strip, in the order of their keys.
    int64_t tiles(int64_t strip) const { return windowed_ ? 1 : strip + (is_one(strip) ? 0 : 1); }
    AttentionTile tile(int64_t strip, int64_t index) const;

    int64_t most_queries() const { return most_queries_; }
    int64_t most_keys() const { return most_keys_; }
    // Heads of keys that a call takes: a divisor of theirs.
    int64_t kv_heads() const { return kv_heads_; }
    // Whether a query's gradient is a sum over tiles.
    bool sums_queries() const { return !windowed_; }

private:
    // A last strip of one query, whose own key belongs to the tile before: cuDNN has no kernel for
    // a square of one.
    bool is_one(int64_t strip) const {
        return strip > 0 && shape_.sequence - strip * most_queries_ == 1;
    }

    Attention shape_;
    bool windowed_;
    int64_t most_queries_ = 0, most_keys_ = 0, kv_heads_ = 1;
};

}  // namespace ferry::ops
