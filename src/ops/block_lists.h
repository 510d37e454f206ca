// Which blocks of keys each block of queries sees: a pattern of attention as lists, built once on
// the host. They follow from the sequence, the block and the pattern alone.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "ferry/units.h"

namespace ferry::ops {

// Tokens of a sequence.
struct SequencePart {
    int64_t first = 0, count = 0;
    constexpr int64_t end() const { return first + count; }
};

// The lists as kernels read them, in the memory of their device. A list of layout l and block b
// is entries [starts[i], starts[i + 1]), i = l * blocks + b.
struct BlockListsView {
    int32_t block = 0, layouts = 0, blocks = 0;  // as in BlockLists
    const int32_t *row_starts = nullptr, *columns = nullptr;
    const int32_t *column_starts = nullptr, *rows = nullptr;

    // Where the list of a block stands for this query head.
    constexpr int64_t index(int64_t head, int64_t at) const { return head % layouts * blocks + at; }
    // In memory that the caller reads: the key blocks of a query block, and the reverse.
    std::span<const int32_t> keys_of(int64_t head, int64_t query_block) const {
        const int64_t i = index(head, query_block);
        return {columns + row_starts[i], columns + row_starts[i + 1]};
    }
    std::span<const int32_t> queries_of(int64_t head, int64_t key_block) const {
        const int64_t i = index(head, key_block);
        return {rows + column_starts[i], rows + column_starts[i + 1]};
    }
};

// Block (i, j) is tokens [i * block, (i + 1) * block) of the queries against those of the keys from
// j * block on; the last block of a sequence may be shorter. Within a block that is there a query
// sees the keys up to its own.
struct BlockLists {
    int block = 64;                        // tokens: 64 or 128
    int layouts = 1;                       // of the query heads the h-th has the (h % layouts)-th
    int blocks = 0;                        // ceil(sequence / block)
    std::vector<int32_t> row_starts{};     // [layouts * blocks + 1]
    std::vector<int32_t> columns{};        // key blocks of each query block, ascending, <= its own
    std::vector<int32_t> column_starts{};  // [layouts * blocks + 1]
    std::vector<int32_t> rows{};           // query blocks of each key block, ascending

    // The key blocks of a query block.
    std::span<const int32_t> keys_of(int64_t layout, int64_t query_block) const {
        return list(row_starts, columns, layout * blocks + query_block);
    }
    // The query blocks of a key block.
    std::span<const int32_t> queries_of(int64_t layout, int64_t key_block) const {
        return list(column_starts, rows, layout * blocks + key_block);
    }
    bool sees(int64_t layout, int64_t query_block, int64_t key_block) const;

    // Blocks that are there, of all layouts, and those that the causal mask alone would leave.
    int64_t visible_blocks() const { return static_cast<int64_t>(columns.size()); }
    int64_t causal_blocks() const { return int64_t{layouts} * blocks * (blocks + 1) / 2; }
    // Pairs of query and key that are seen in a sequence of so many tokens, of all layouts; with a
    // window (0: none) those within it.
    double visible_pairs(int64_t sequence, int64_t window = 0) const {
        return visible_pairs({0, sequence}, {0, sequence}, window);
    }
    double visible_pairs(const SequencePart& queries, const SequencePart& keys,
                         int64_t window) const;

    // column_starts and rows, from row_starts and columns.
    void transpose();
    // The lists of these query heads alone, of which the first is then the 0-th.
    BlockLists of_heads(int64_t first, int64_t count) const;

    // Where all lists stand when they lie behind each other: row_starts, columns, column_starts,
    // rows. `memory` has memory_bytes(), or is null.
    int64_t memory_bytes() const;
    BlockListsView view_at(const std::byte* memory) const;
    // A view of these vectors themselves.
    BlockListsView view() const;

private:
    static std::span<const int32_t> list(const std::vector<int32_t>& starts,
                                         const std::vector<int32_t>& of, int64_t index) {
        const auto i = static_cast<size_t>(index);
        return std::span(of).subspan(static_cast<size_t>(starts[i]),
                                     static_cast<size_t>(starts[i + 1] - starts[i]));
    }
};

}  // namespace ferry::ops
