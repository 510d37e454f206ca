// Rows of the residual stream among the ranks that share tensors: sums of what each of them has a
// part of, and rows of each that all need.
#pragma once

#include <algorithm>

#include "carver.h"
#include "model/model.h"

namespace ferry::model {

// The rows of a micro-batch's residual stream that a rank has: one after the other, in rank order.
// All ranks have room for as many; where they do not divide the tokens the last ones have fewer, or
// none. Without ranks that share tensors: all.
struct RowShare {
    explicit RowShare(const Numerics& numerics)
        : tokens(numerics.tokens()),
          each(ceil_div(tokens, int64_t{numerics.slices})),
          first(std::min(numerics.slice * each, tokens)),
          own(std::min(each, tokens - first)),
          padded(numerics.slices * each) {}
    int64_t tokens, each, first, own, padded;  // padded: of all ranks' room
};

class SliceSum {
public:
    // Memory of a sum. Parts: an addend, then every rank's, of a rank's rows. Norm leaves that
    // nobody asks for.
    struct Room {
        std::byte* parts = nullptr;
        float* leaves = nullptr;
    };

    // `ranks` may be null, as the Decoder's. `block`: for whoever must be told.
    SliceSum(const Numerics& numerics, KernelRanks* ranks, ops::Ops& ops, int64_t block)
        : rows(numerics),
          slices_(numerics.slices),
          slice_(numerics.slice),
          ranks_(ranks),
          ops_(ops),
          block_(block) {}

    // `leaf_elements`: that someone else adds up with the same leaves.
    Room cut(Carver& carver, int64_t row_bytes, int64_t cols, int64_t leaf_elements = 0) const;

    // What holds all ranks' rows is [padded, cols]; this rank's of it, and those of tokens.
    ops::View own(const ops::View& all) const { return all.row_range(rows.first, rows.own); }
    ops::View real(const ops::View& all) const { return all.row_range(0, rows.tokens); }

    // `all` holds this rank's part of a sum; `sum`, which may be its own rows there, receives
    // round(addend + all ranks') of its own rows, added in rank order. Rows have no gaps.
    void add_up(ops::View all, ops::ConstView addend, ops::View sum, const Room& room) const;
    // Everybody's own rows come to all.
    void gather(ops::View all) const;
    // The same of a few numbers: [ranks, bytes].
    void gather(const void* mine, void* all, int64_t bytes) const;

    // What a rank sends for each of these.
    int64_t bytes(int64_t row_bytes) const { return (slices_ - 1) * rows.each * row_bytes; }
    int64_t gathered_bytes(int64_t bytes) const { return (slices_ - 1) * bytes; }

    const RowShare rows;

private:
    const int slices_, slice_;
    KernelRanks* const ranks_;
    ops::Ops& ops_;
    const int64_t block_;
};

}  // namespace ferry::model
