#include "slice_sum.h"

#include <algorithm>

namespace ferry::model {

using ops::ConstView;
using ops::View;

namespace {
constexpr int64_t kLeaf = 4096;  // elements of a norm leaf, as Ops::sum_gradient has them
}

SliceSum::Room SliceSum::cut(Carver& carver, std::initializer_list<int64_t> rows, int64_t row_bytes,
                             int64_t cols, int64_t leaf_elements) const {
    const int64_t each = rows_of(std::ranges::max(rows));
    const bool all_even =
        std::ranges::all_of(rows, [this](int64_t count) { return count % slices_ == 0; });
    Room room;
    room.parts = carver.bytes((slices_ + 1) * each * row_bytes);
    room.sum = carver.bytes(all_even ? 0 : slices_ * each * row_bytes);
    room.leaves = carver.floats(ceil_div(std::max(each * cols, leaf_elements), kLeaf));
    return room;
}

void SliceSum::add_up(View y, ConstView addend, const Room& room) const {
    const int64_t rows = rows_of(y.rows), bytes = rows * y.cols * size_of(y.type);
    const bool even = y.rows % slices_ == 0;
    const View whole = even ? y : View::of(room.sum, y.type, slices_ * rows, y.cols);
    if (!even) ops_.copy_out(y, whole.row_range(0, y.rows));
    auto* const all = static_cast<std::byte*>(whole.data);
    if (ranks_) ranks_->exchange(all, room.parts + bytes, bytes, block_);
    const int64_t first = slice_ * rows;
    const int64_t count = std::clamp(y.rows - first, int64_t{0}, rows);
    if (count > 0) {
        const bool adds = addend.data != nullptr;
        if (adds)
            ops_.copy_out(addend.row_range(first, count),
                          View::of(room.parts, y.type, count, y.cols));
        const ConstView parts = ConstView::of(room.parts + (adds ? 0 : bytes), y.type,
                                              slices_ + (adds ? 1 : 0), rows * y.cols);
        ops_.sum_gradient(parts.col_range(0, count * y.cols), whole.row_range(first, count).data,
                          room.leaves);
    }
    if (ranks_) ranks_->gather(all + slice_ * bytes, all, bytes, block_);
    if (!even) ops_.copy_out(whole.row_range(0, y.rows), y);
}

}  // namespace ferry::model
