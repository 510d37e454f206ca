#include "slice_sum.h"

#include <algorithm>

namespace ferry::model {

using ops::ConstView;
using ops::View;

namespace {
constexpr int64_t kLeaf = 4096;  // elements of a norm leaf, as Ops::sum_gradient has them
}

SliceSum::Room SliceSum::cut(Carver& carver, int64_t row_bytes, int64_t cols,
                             int64_t leaf_elements) const {
    Room room;
    room.parts = carver.bytes((slices_ + 1) * rows.each * row_bytes);
    room.leaves = carver.floats(ceil_div(std::max(rows.each * cols, leaf_elements), kLeaf));
    return room;
}

void SliceSum::add_up(View all, ConstView addend, View sum, const Room& room) const {
    FERRY_CHECK(all.rows == rows.padded && all.ld == all.cols);
    const int64_t elements = rows.each * all.cols;
    const int64_t bytes = elements * size_of(all.type);
    if (ranks_)
        ranks_->exchange(static_cast<const std::byte*>(all.data), room.parts + bytes, bytes,
                         block_);
    if (rows.own == 0) return;
    const bool adds = addend.data != nullptr;
    if (adds) ops_.copy_out(addend, View::of(room.parts, all.type, rows.own, all.cols));
    const ConstView parts = ConstView::of(room.parts + (adds ? 0 : bytes), all.type,
                                          slices_ + (adds ? 1 : 0), elements);
    ops_.sum_gradient(parts.col_range(0, rows.own * all.cols), sum.data, room.leaves);
}

void SliceSum::gather(View all) const {
    FERRY_CHECK(all.rows == rows.padded);
    const int64_t bytes = rows.each * all.ld * size_of(all.type);
    auto* const data = static_cast<std::byte*>(all.data);
    if (ranks_) ranks_->gather(data + slice_ * bytes, data, bytes, block_);
}

void SliceSum::gather(const void* mine, void* all, int64_t bytes) const {
    if (ranks_)
        ranks_->gather(static_cast<const std::byte*>(mine), static_cast<std::byte*>(all), bytes,
                       block_);
}

}  // namespace ferry::model
