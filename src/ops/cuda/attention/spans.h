// What the kernels of sparse_attention.py know of a mask: which places of a block's list matter.
#pragma once

#include <cuda_runtime.h>

#include "ops/part_attention.h"

namespace ferry::ops::cuda {

// Places in a list of blocks: those of [begin, whole) and [whole_end, end) are cut by a document, a
// window, the diagonal or the sequence's end; every query of [whole, whole_end) sees every key.
struct Span {
    int32_t begin, whole, whole_end, end;
};

// Lists of a pattern, or of all blocks where there is none: the lists of block b are then the
// places [0, b] and [b, blocks) of 0, 1, 2, ... Of all queries and keys of the sequences, or of a
// part of them: its own blocks are those that it touches, counted from the first, and those that
// stick out of it are cut.
struct SpanRoom {
    SequencePart queries{}, keys{};              // of each sequence
    int64_t layouts = 0, blocks = 0, block = 0;  // layouts: as BlockLists has them
    int64_t query_blocks = 0, key_blocks = 0;    // own ones; `blocks`: the sequence's
    int64_t orders_of_keys = 0;                  // 1, or one a key/value head
    // [sequences, queries] and [sequences, keys]: a query's first key, one past a key's last query.
    int32_t *low = nullptr, *high = nullptr;
    // [sequences, layouts, own blocks].
    Span *of_queries = nullptr, *of_keys = nullptr;
    // The blocks, those with most to do first: [sequences, layouts, query_blocks] and
    // [sequences, orders_of_keys, key_blocks].
    int32_t *order_of_queries = nullptr, *order_of_keys = nullptr;
    int32_t* identity = nullptr;  // [blocks], where there is no pattern

    // Laid out in memory of bytes(); null: only their size.
    SpanRoom(const Attention& shape, std::byte* memory, bool backward);
    SpanRoom(const Attention& shape, const SequencePart& queries, const SequencePart& keys,
             std::byte* memory, bool backward);
    // Of parts of so many tokens, wherever they begin: at least as much as one of them.
    static SpanRoom largest(const Attention& shape, int64_t queries, int64_t keys, bool backward);
    int64_t bytes() const { return bytes_; }

private:
    int64_t bytes_ = 0;
};

// Fills the room; of_keys only where it has one.
void find_spans(const Attention& shape, const SpanRoom& room, cudaStream_t stream);

}  // namespace ferry::ops::cuda
