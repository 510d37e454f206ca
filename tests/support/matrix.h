// Operands of the operations' tests, of any type and with gaps, and how near two of them must be.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <vector>

#include "base/random.h"
#include "ops/ops.h"

namespace ferry::ops {

// A matrix with room around it: filled with a pattern, so that a write outside is seen.
class Matrix {
public:
    Matrix(DType type, int64_t rows, int64_t cols, int64_t gap = 3, int64_t shift = 0)
        : type_(type),
          rows_(rows),
          cols_(cols),
          ld_(cols + gap),
          shift_(shift),
          bytes_(static_cast<size_t>(((rows * ld_) + shift + 32) * size_of(type)),
                 std::byte{0x5a}) {}

    Matrix& random(uint32_t seed, float scale = 1) {
        for (int64_t r = 0; r < rows_; ++r) {
            for (int64_t c = 0; c < cols_; ++c) {
                const auto element = static_cast<uint32_t>(r * cols_ + c);
                set(r, c, scale * philox_normal({seed, Purpose::test}, {0, 0, 0, element}));
            }
        }
        return *this;
    }
    Matrix& fill(float value) {
        for (int64_t r = 0; r < rows_; ++r) {
            for (int64_t c = 0; c < cols_; ++c) set(r, c, value);
        }
        return *this;
    }
    View view() { return {bytes_.data() + shift_ * size_of(type_), type_, rows_, cols_, ld_}; }
    ConstView view() const { return const_cast<Matrix*>(this)->view(); }
    void set(int64_t r, int64_t c, float value) {
        std::byte* at = bytes_.data() + (r * ld_ + c + shift_) * size_of(type_);
        const uint16_t half = type_ == DType::bf16 ? to_bf16(value) : to_f16(value);
        if (type_ == DType::f32)
            std::memcpy(at, &value, 4);
        else
            std::memcpy(at, &half, 2);
    }
    float get(int64_t r, int64_t c) const {
        const std::byte* at = bytes_.data() + (r * ld_ + c + shift_) * size_of(type_);
        float wide = 0;
        uint16_t half = 0;
        if (type_ == DType::f32)
            std::memcpy(&wide, at, 4);
        else
            std::memcpy(&half, at, 2);
        if (type_ == DType::f32) return wide;
        return type_ == DType::bf16 ? from_bf16(half) : from_f16(half);
    }
    DType type() const { return type_; }
    int64_t rows() const { return rows_; }
    int64_t cols() const { return cols_; }
    // The gaps included.
    bool same_bytes(const Matrix& other) const { return bytes_ == other.bytes_; }
    bool same_values(const Matrix& other) const {
        for (int64_t r = 0; r < rows_; ++r) {
            for (int64_t c = 0; c < cols_; ++c) {
                if (get(r, c) != other.get(r, c)) return false;
            }
        }
        return true;
    }

private:
    DType type_;
    int64_t rows_, cols_, ld_, shift_;
    std::vector<std::byte> bytes_;
};

// Distance of neighbours, relative to the smaller: two values that round differently differ by it.
inline double unit_of(DType type) {
    return type == DType::f32 ? 1.2e-7 : type == DType::bf16 ? 7.9e-3 : 9.8e-4;
}

// |actual - expected| <= scale * fp32 noise + one unit of the type.
inline void expect_near(const Matrix& actual, const Matrix& expected, double scale,
                        double noise = 2e-6) {
    for (int64_t r = 0; r < actual.rows(); ++r) {
        for (int64_t c = 0; c < actual.cols(); ++c) {
            const double want = expected.get(r, c);
            const double limit = noise * scale + unit_of(actual.type()) * 1.01 * std::abs(want);
            ASSERT_NEAR(actual.get(r, c), want, limit) << r << "," << c;
        }
    }
}

inline std::vector<std::byte> scratch_of(int64_t bytes) {
    return std::vector<std::byte>(static_cast<size_t>(bytes) + 64, std::byte{0x7f});
}
inline std::byte* aligned(std::vector<std::byte>& scratch) {
    auto at = reinterpret_cast<uintptr_t>(scratch.data());
    return scratch.data() + (64 - at % 64) % 64;
}

}  // namespace ferry::ops
