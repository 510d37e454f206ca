// Patterns of attention: from their parameters to lists of blocks. What is behind a query's own
// block is never in a list, whatever the pattern says of it.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "ferry/error.h"
#include "ops/block_lists.h"

namespace ferry::ops {

enum class PatternKind : uint8_t { dense, window, fixed, bigbird, longformer, variable, layout };

// A layout that somebody drew: [layers, heads, side, side] cells, 1 where a block is there.
struct PatternLayout {
    std::string where{};  // the file, for errors
    int64_t block = 0, layers = 0, heads = 0, side = 0;
    std::vector<uint8_t> cells{};
    bool at(int64_t layer, int64_t head, int64_t row, int64_t column) const {
        return cells[static_cast<size_t>(((layer * heads + head) * side + row) * side + column)] !=
               0;
    }
};

// Lengths are in blocks of `block` tokens, as DeepSpeed's `sparse_attention` counts them. Lists are
// of blocks of at least 64 tokens: where `block` is smaller, one is there if any of its parts is.
struct Pattern {
    PatternKind kind = PatternKind::dense;
    int64_t block = 64;  // tokens: 16, 32, 64 or 128
    bool different_layout_per_head = false, different_layout_per_layer = false;
    bool bidirectional = false;  // draws random blocks before and behind; the latter are cut
    bool horizontal_global_attention = false;
    int64_t num_local_blocks = 4, num_global_blocks = 1, num_different_global_patterns = 1;
    int64_t num_random_blocks = 0, num_sliding_window_blocks = 3;
    std::vector<int64_t> local_window_blocks{4};
    std::vector<int64_t> global_block_indices{0}, global_block_end_indices{};
    bool allow_empty_rows = false;
    uint32_t seed = 0;
    std::shared_ptr<const PatternLayout> layout{};
};

// The block that the lists of a pattern have.
constexpr int64_t listed_block(int64_t block) { return block < 64 ? 64 : block; }

// Throws usage, naming the key (attention.*), where parameters contradict each other.
void check_pattern(const Pattern& pattern);

// The model or its attention takes no sequences of this length: usage.
class LengthRefused : public Error {
public:
    explicit LengthRefused(Problem problem) : Error(Trouble::usage, std::move(problem)) {}
};

// The lists of a layer's attention over sequences of so many tokens, by `heads` query heads. Throws
// usage where a layout does not fit the model. A sequence may have fewer blocks than are asked for,
// or more than the layout; or a row of blocks is empty though the pattern allows none. Then it
// throws LengthRefused.
BlockLists lists_of(const Pattern& pattern, int64_t sequence, int64_t heads, int64_t layer);

}  // namespace ferry::ops
