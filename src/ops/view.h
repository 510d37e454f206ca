// Matrices in anyone's memory: what the operations work on.
#pragma once

#include <cstddef>
#include <cstdint>

#include "ferry/dtype.h"

namespace ferry::ops {

// A row-major matrix; row r begins at element r * ld. Without data, only a shape; so are its parts.
struct View {
    void* data = nullptr;
    DType type = DType::f32;
    int64_t rows = 0, cols = 0, ld = 0;

    static View of(void* data, DType type, int64_t rows, int64_t cols) {
        return {data, type, rows, cols, cols};
    }
    View block(int64_t row, int64_t row_count, int64_t col, int64_t col_count) const {
        auto* at = static_cast<std::byte*>(data);
        if (at != nullptr) at += (row * ld + col) * size_of(type);
        return {at, type, row_count, col_count, ld};
    }
    View row_range(int64_t row, int64_t count) const { return block(row, count, 0, cols); }
    View col_range(int64_t col, int64_t count) const { return block(0, rows, col, count); }
};

struct ConstView {
    const void* data = nullptr;
    DType type = DType::f32;
    int64_t rows = 0, cols = 0, ld = 0;

    ConstView() = default;
    // NOLINTNEXTLINE(google-explicit-constructor): reading what may be written needs no ceremony
    ConstView(const View& v) : data(v.data), type(v.type), rows(v.rows), cols(v.cols), ld(v.ld) {}
    ConstView(const void* at, DType t, int64_t r, int64_t c, int64_t stride)
        : data(at), type(t), rows(r), cols(c), ld(stride) {}
    static ConstView of(const void* data, DType type, int64_t rows, int64_t cols) {
        return {data, type, rows, cols, cols};
    }
    ConstView block(int64_t row, int64_t row_count, int64_t col, int64_t col_count) const {
        const auto* at = static_cast<const std::byte*>(data);
        if (at != nullptr) at += (row * ld + col) * size_of(type);
        return {at, type, row_count, col_count, ld};
    }
    ConstView row_range(int64_t row, int64_t count) const { return block(row, count, 0, cols); }
    ConstView col_range(int64_t col, int64_t count) const { return block(0, rows, col, count); }
};

}  // namespace ferry::ops
