// Sums over the ranks that share tensors, of rows that each of them has a part of.
#pragma once

#include <initializer_list>

#include "carver.h"
#include "model/model.h"

namespace ferry::model {

class SliceSum {
public:
    // Memory of the largest sum. Parts: an addend, then every rank's, of some rows. The sum, where
    // ranks do not divide its rows. Norm leaves that nobody asks for.
    struct Room {
        std::byte *parts = nullptr, *sum = nullptr;
        float* leaves = nullptr;
    };

    // `ranks` may be null, as the Decoder's. `block`: for whoever must be told.
    SliceSum(const Numerics& numerics, KernelRanks* ranks, ops::Ops& ops, int64_t block)
        : slices_(numerics.slices),
          slice_(numerics.slice),
          ranks_(ranks),
          ops_(ops),
          block_(block) {}

    // For sums of each of these numbers of rows. `leaf_elements`: that someone else adds up with
    // the same leaves.
    Room cut(Carver& carver, std::initializer_list<int64_t> rows, int64_t row_bytes, int64_t cols,
             int64_t leaf_elements = 0) const;
    // y holds this rank's part of a sum, and receives round(addend + all ranks'), in rank order.
    void add_up(ops::View y, ops::ConstView addend, const Room& room) const;

    // What a rank sends for one: there and back.
    static int64_t bytes(int slices, int64_t rows, int64_t row_bytes) {
        return int64_t{2} * (slices - 1) * ceil_div(rows, int64_t{slices}) * row_bytes;
    }
    static constexpr int64_t kCalls = 2;

private:
    int64_t rows_of(int64_t rows) const { return ceil_div(rows, int64_t{slices_}); }
    const int slices_, slice_;
    KernelRanks* const ranks_;
    ops::Ops& ops_;
    const int64_t block_;
};

}  // namespace ferry::model
