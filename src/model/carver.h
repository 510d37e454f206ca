// Cuts typed, 64-byte aligned buffers from the caller's scratch. Without memory it only measures,
// so one function both sizes scratch and uses it.
#pragma once

#include <algorithm>

#include "ferry/units.h"
#include "ops/ops.h"

namespace ferry::model {

class Carver {
public:
    explicit Carver(std::byte* memory) : memory_(memory) {}

    std::byte* bytes(int64_t count) {
        std::byte* at = memory_ == nullptr ? nullptr : memory_ + used_;
        used_ += round_up(count, 64);
        peak_ = std::max(peak_, used_);
        return at;
    }
    ops::View matrix(DType type, int64_t rows, int64_t cols) {
        return ops::View::of(bytes(rows * cols * size_of(type)), type, rows, cols);
    }
    // The same with rows that begin at multiples of 64 elements, and at least `spare` behind each.
    ops::View padded_matrix(DType type, int64_t rows, int64_t cols, int64_t spare) {
        const int64_t ld = round_up(cols + spare, 64);
        return matrix(type, rows, ld).col_range(0, cols);
    }
    float* floats(int64_t count) { return reinterpret_cast<float*>(bytes(count * 4)); }

    // Memory cut since `mark` may be cut again.
    int64_t mark() const { return used_; }
    void rewind(int64_t mark) { used_ = mark; }
    int64_t peak() const { return peak_; }

private:
    std::byte* memory_;
    int64_t used_ = 0, peak_ = 0;
};

}  // namespace ferry::model
