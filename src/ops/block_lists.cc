#include "ops/block_lists.h"

#include <algorithm>

namespace ferry::ops {
namespace {

// The pairs of query and key that one block of each sees.
double pairs_of_block(int64_t query, int64_t queries, int64_t key, int64_t keys, int64_t window) {
    if (key + keys <= query + 1 && (window == 0 || query + queries - key <= window))
        return static_cast<double>(queries *
                                   keys);  // no query is before a key or beyond the window
    double pairs = 0;
    for (int64_t q = query; q < query + queries; ++q) {
        const int64_t first = window == 0 ? key : std::max(key, q - window + 1);
        pairs += static_cast<double>(std::max<int64_t>(0, std::min(q + 1, key + keys) - first));
    }
    return pairs;
}

}  // namespace

bool BlockLists::sees(int64_t layout, int64_t query_block, int64_t key_block) const {
    return std::ranges::binary_search(keys_of(layout, query_block),
                                      static_cast<int32_t>(key_block));
}

double BlockLists::visible_pairs(const SequencePart& queries, const SequencePart& keys,
                                 int64_t window) const {
    // What of a block lies in a part.
    const auto inside = [this](const SequencePart& part, int64_t at) {
        const int64_t first = std::max(at * block, part.first);
        return SequencePart{first,
                            std::max<int64_t>(0, std::min((at + 1) * block, part.end()) - first)};
    };
    double pairs = 0;
    for (int64_t layout = 0; layout < layouts; ++layout) {
        for (int64_t row = queries.first / block; row * block < queries.end(); ++row) {
            const SequencePart q = inside(queries, row);
            for (const int64_t column : keys_of(layout, row)) {
                const SequencePart k = inside(keys, column);
                pairs += pairs_of_block(q.first, q.count, k.first, k.count, window);
            }
        }
    }
    return pairs;
}

void BlockLists::transpose() {
    column_starts.assign(row_starts.size(), 0);
    rows.resize(columns.size());
    for (int64_t layout = 0; layout < layouts; ++layout) {
        const int64_t first = layout * blocks;
        for (int64_t row = 0; row < blocks; ++row) {
            for (const int32_t column : keys_of(layout, row))
                ++column_starts[static_cast<size_t>(first + column + 1)];
        }
    }
    for (size_t i = 1; i < column_starts.size(); ++i) column_starts[i] += column_starts[i - 1];
    std::vector<int32_t> next(column_starts.begin(), column_starts.end() - 1);
    for (int64_t layout = 0; layout < layouts; ++layout) {
        for (int64_t row = 0; row < blocks; ++row) {
            for (const int32_t column : keys_of(layout, row)) {
                int32_t& at = next[static_cast<size_t>(layout * blocks + column)];
                rows[static_cast<size_t>(at++)] = static_cast<int32_t>(row);
            }
        }
    }
}

BlockLists BlockLists::of_heads(int64_t first, int64_t count) const {
    if (count >= layouts && first % layouts == 0) return *this;
    const auto kept = static_cast<int>(std::min<int64_t>(layouts, count));
    BlockLists part{.block = block, .layouts = kept, .blocks = blocks};
    part.row_starts.push_back(0);
    for (int64_t head = first; head < first + kept; ++head) {
        for (int64_t row = 0; row < blocks; ++row) {
            const std::span<const int32_t> keys = keys_of(head % layouts, row);
            part.columns.insert(part.columns.end(), keys.begin(), keys.end());
            part.row_starts.push_back(static_cast<int32_t>(part.columns.size()));
        }
    }
    part.transpose();
    return part;
}

int64_t BlockLists::memory_bytes() const {
    return 2 * static_cast<int64_t>((row_starts.size() + columns.size()) * sizeof(int32_t));
}

BlockListsView BlockLists::view_at(const std::byte* memory) const {
    BlockListsView v{block, layouts, blocks};
    if (memory == nullptr) return v;
    v.row_starts = reinterpret_cast<const int32_t*>(memory);
    v.columns = v.row_starts + row_starts.size();
    v.column_starts = v.columns + columns.size();
    v.rows = v.column_starts + column_starts.size();
    return v;
}

BlockListsView BlockLists::view() const {
    return {block,      layouts, blocks, row_starts.data(), columns.data(), column_starts.data(),
            rows.data()};
}

}  // namespace ferry::ops
