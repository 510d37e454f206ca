// What one rank has in a layout: stages, tokens, and elements of the stage that has most.
#pragma once

#include <algorithm>
#include <cstdint>

#include "cost/rank_layout.h"
#include "ferry/units.h"

namespace ferry::cost {

// Refers to both.
class RankPart {
public:
    RankPart(const ModelSizes& model, const Layout& layout) : m_(model), layout_(layout) {
        // Of the stage with a table. A tied one's state is on the first stage.
        table_ = ceil_div(m_.vocab, layout_.tensor) * m_.hidden;
        block_ = on_a_rank(m_.block);
        const int64_t embedding = padded(table_) + padded(m_.embedding_whole),
                      head = (m_.tied ? 0 : padded(table_)) + padded(m_.head_whole);
        const int64_t edges = layout_.pipeline == 1 ? embedding + head : std::max(embedding, head);
        edge_ = std::max(embedding, head);
        in_blocks_ = blocks_of_one() * layout_.virtual_stages * block_;
        all_ = in_blocks_ + edges;
    }

    // Of the largest virtual stage.
    int64_t blocks_of_one() const {
        return ceil_div(m_.blocks, layout_.pipeline * layout_.virtual_stages);
    }
    double stages() const { return static_cast<double>(layout_.pipeline); }
    double slices() const { return static_cast<double>(layout_.tensor); }
    // Of a slice: all of a stage share state and gradients.
    int64_t sharer_count() const { return layout_.replicas * layout_.sequence; }
    double sharers() const { return static_cast<double>(sharer_count()); }
    double micro_batches() const { return static_cast<double>(layout_.micro_batches); }
    double groups() const { return static_cast<double>(layout_.groups); }
    double virtual_stages() const { return static_cast<double>(layout_.virtual_stages); }
    double group_size() const { return micro_batches() / groups(); }
    zero::Sharding sharding() const { return zero::sharding_of(layout_.zero_stage); }
    bool shares_weights() const { return sharding().weights; }
    // Of a rank's part of a sequence.
    int64_t tokens() const { return layout_.micro_batch * m_.sequence / layout_.sequence; }
    double blocks() const { return static_cast<double>(blocks_of_one() * layout_.virtual_stages); }
    double width() const { return static_cast<double>(m_.element.weight); }
    // Of a micro-batch: what a rank has of the residual stream, and one way of its rows.
    double stream_bytes() const { return static_cast<double>(tokens() * m_.hidden * m_.residual); }
    double input_bytes() const { return stream_bytes() / (m_.shares_rows ? slices() : 1); }
    double one_way(int64_t width) const {
        const int64_t rows = ceil_div(tokens(), layout_.tensor);
        return static_cast<double>((layout_.tensor - 1) * rows * m_.hidden * width);
    }

    // Elements of a table and a block, of the larger edge, of all blocks, of all.
    int64_t table() const { return table_; }
    int64_t block() const { return block_; }
    int64_t edge() const { return edge_; }
    int64_t in_blocks() const { return in_blocks_; }
    int64_t all() const { return all_; }
    double elements() const { return static_cast<double>(all_); }
    // Of these, what a rank updates, and whose weights it keeps.
    int64_t own_count() const { return sharding().state ? all_ / sharer_count() : all_; }
    double own() const { return static_cast<double>(own_count()); }
    double kept() const { return shares_weights() ? elements() / sharers() : elements(); }

    // Of weights that do not stay, a group's: blocks are visited forward and backward, the rest
    // once, and a tied table on both sides of the blocks.
    double read_in_a_group() const {
        const int64_t twice = m_.tied && layout_.pipeline == 1 ? padded(table_) : 0;
        const double visited = elements() + static_cast<double>(in_blocks_ + twice);
        return visited * width() / (shares_weights() ? sharers() : 1);
    }

    // Of a block and a token, forward.
    double block_flops() const {
        const int64_t elements =
            of_inner(m_.block.inner) + of_queries(m_.block.of_queries) + of_keys(m_.block.of_keys);
        return 2 * static_cast<double>(elements) + m_.attention_flops * head_share();
    }

    // Of a block and a micro-batch: what zero bubble keeps for the gradients of weights.
    double factor_bytes() const {
        const auto keys = static_cast<double>(own_keys() * m_.head_dim),
                   queries = static_cast<double>(m_.heads * m_.head_dim) * head_share(),
                   inner = static_cast<double>(of_inner(m_.mlp_columns));
        return static_cast<double>(tokens()) * width() *
               (4 * static_cast<double>(m_.hidden) + 2 * queries + 2 * keys + inner);
    }

    // Cut into shards, one a rank.
    int64_t padded(int64_t elements) const {
        return round_up(elements, kShardUnit * sharer_count());
    }
    // Heads of keys that a rank has, those that are zeros counted; and its columns of the MLP.
    int64_t own_keys() const { return ceil_div(m_.kv_heads, layout_.tensor); }
    int64_t own_inner() const { return ceil_div(m_.intermediate, layout_.tensor); }
    // Of a rank: of what queries have, of what keys and values have, of what the MLP has. Heads of
    // keys that several ranks have are whole on each, and their queries divided.
    int64_t of_queries(int64_t elements) const {
        return layout_.tensor > m_.kv_heads ? ceil_div(elements, layout_.tensor)
                                            : of_keys(elements);
    }
    int64_t of_keys(int64_t elements) const { return ceil_div(elements, m_.kv_heads) * own_keys(); }
    int64_t of_inner(int64_t elements) const {
        return m_.intermediate == 0 ? ceil_div(elements, layout_.tensor)
                                    : elements / m_.intermediate * own_inner();
    }
    double head_share() const {
        const auto keys = static_cast<double>(m_.kv_heads);
        return layout_.tensor > m_.kv_heads ? 1 / slices() : static_cast<double>(own_keys()) / keys;
    }
    int64_t on_a_rank(const LayerElements& layer) const {
        const int64_t keys = of_keys(layer.of_keys),
                      divided = of_inner(layer.inner) + of_queries(layer.of_queries);
        // What several ranks have is a segment of its own.
        const bool apart = layout_.tensor > m_.kv_heads;
        return (apart ? padded(divided) + padded(keys) : padded(divided + keys)) +
               padded(layer.whole);
    }

private:
    // A shard is a multiple of so many elements.
    static constexpr int64_t kShardUnit = 4096;

    const ModelSizes& m_;
    const Layout& layout_;
    int64_t table_ = 0, block_ = 0, edge_ = 0, in_blocks_ = 0, all_ = 0;
};

}  // namespace ferry::cost
