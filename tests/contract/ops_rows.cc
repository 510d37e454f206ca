// Operations on rows, of every implementation of Ops against the oracle, on odd sizes, for every
// type: sums, gates, rotation, rounding and copies.
#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <limits>
#include <utility>
#include <vector>

#include "tests/contract/ops_fixture.h"

namespace ferry::ops {
namespace {

class OpsRows : public OpsContract {};

TEST_P(OpsRows, rows_are_summed_onto_what_is_there) {
    const bool gpu = std::get<0>(GetParam()).threads == kGpu;
    // Columns of one strip and of so many that a GPU's clusters have eight blocks, two and one.
    for (const auto& [rows, cols] : {std::pair{1, 1},
                                     {63, 5},
                                     {64, 33},
                                     {200, 1030},
                                     {129, 128},
                                     {65, 136},
                                     {4099, 1600},
                                     {1031, 4808},
                                     {300, 17000}}) {
        if (rows * cols > 1'000'000 && !gpu) continue;
        SCOPED_TRACE(cols);
        for (const int64_t gap : {0, 3}) {
            const Matrix x = Matrix(type(), rows, cols, gap).random(1);
            Matrix sums = Matrix(DType::f32, 1, cols, 0).random(2), sums0 = sums, again = sums;
            auto scratch = scratch_of(ops().norm_backward_scratch_bytes(rows, cols));
            const auto sum = [&](Ops& by, Matrix& to, std::byte* room) {
                by.sum_rows(x.view(), static_cast<float*>(to.view().data), room);
            };
            sum(ops(), sums, aligned(scratch));
            sum(oracle(), sums0, nullptr);
            sum(ops(), again, aligned(scratch));
            expect_near(sums, sums0, 10);
            EXPECT_TRUE(again.same_bytes(sums));
        }
    }
}

// ops.h: results never depend on alignment. Rows at multiples of 16 bytes, at odd places, and rows
// so far apart that the second one begins at an odd place.
TEST_P(OpsRows, where_rows_lie_changes_no_bit_of_their_sum) {
    for (const auto& [rows, cols] :
         {std::pair{64, 40}, {513, 64}, {1031, 264}, {4099, 1600}, {4099, 37}}) {
        SCOPED_TRACE(cols);
        std::vector<Matrix> sums;
        for (const auto& [gap, shift] : {std::pair{8, 0}, {8, 1}, {3, 0}, {0, 5}}) {
            const Matrix x = Matrix(type(), rows, cols, gap, shift).random(1);
            sums.push_back(Matrix(DType::f32, 1, cols, 0).random(2));
            auto scratch = scratch_of(ops().norm_backward_scratch_bytes(rows, cols));
            ops().sum_rows(x.view(), static_cast<float*>(sums.back().view().data),
                           aligned(scratch));
            EXPECT_TRUE(sums.back().same_bytes(sums.front())) << gap << ", " << shift;
        }
    }
}

// What lies there is not read, and the bits are those of a sum with zeros; of no rows, zeros.
TEST_P(OpsRows, a_fresh_sum_counts_as_zeros) {
    for (const auto& [rows, n] : {std::pair{0, 64}, {9, 5}, {130, 128}, {70, 1030}, {4099, 264}}) {
        SCOPED_TRACE(rows);
        const Matrix x = Matrix(type(), rows, n, 8).random(1), w = Matrix(type(), 1, n).random(2);
        const Matrix dy = Matrix(type(), rows, n, 8).random(3);
        const std::vector<float> stats(static_cast<size_t>(2 * rows), 0.75f);
        auto scratch = scratch_of(ops().layer_norm_backward_scratch_bytes(rows, n));
        Matrix dx(type(), rows, n);
        const auto same = [&](const char* what, const auto& add) {
            Matrix added = Matrix(DType::f32, 2, n, 0).fill(0), written = added;
            written.fill(std::numeric_limits<float>::quiet_NaN());
            const auto sums = [](Matrix& of, int64_t row, bool fresh) {
                return Accumulator(static_cast<float*>(of.view().row_range(row, 1).data), fresh);
            };
            add(sums(added, 0, false), sums(added, 1, false));
            add(sums(written, 0, true), sums(written, 1, true));
            EXPECT_TRUE(written.same_bytes(added)) << what;
        };
        same("norm", [&](Accumulator one, Accumulator other) {
            ops().norm_backward(dy.view(), x.view(), w.view(), stats.data(), {}, dx.view(), one,
                                aligned(scratch));
            ops().norm_backward(dy.view(), x.view(), w.view(), stats.data(), {}, {}, other,
                                aligned(scratch));
        });
        same("layer norm", [&](Accumulator one, Accumulator other) {
            ops().layer_norm_backward(dy.view(), x.view(), w.view(), stats.data(), {}, dx.view(),
                                      one, other, aligned(scratch));
        });
        same("rows", [&](Accumulator one, Accumulator other) {
            ops().sum_rows(x.view(), one, aligned(scratch));
            ops().sum_rows(dy.view(), other, aligned(scratch));
        });
    }
}

TEST_P(OpsRows, rope_turns_and_turns_back) {
    for (const int64_t head_dim : {2, 6, 64, 96, 128}) {
        const std::vector<double> frequencies = frequencies_of(head_dim);
        const Rope rope{
            .sequence = 37, .heads = 3, .head_dim = head_dim, .frequencies = frequencies.data()};
        const Matrix start = Matrix(type(), 2 * 37, 3 * head_dim).random(1);
        Matrix x = start, x0 = start;
        ops().rope(x.view(), rope);
        oracle().rope(x0.view(), rope);
        expect_near(x, x0, 4);
        Rope back = rope;
        back.inverse = true;
        ops().rope(x.view(), back);
        expect_near(x, start, 4, type() == DType::f32 ? 2e-6 : unit_of(type()));
        Rope longer = rope;
        longer.amplitude = 1.3;
        for (const bool inverse : {false, true}) {
            longer.inverse = inverse;
            Matrix y = start, y0 = start;
            ops().rope(y.view(), longer);
            oracle().rope(y0.view(), longer);
            expect_near(y, y0, 4);
        }
    }
}

TEST_P(OpsRows, swiglu_forward_and_backward) {
    for (const int64_t cols : {1, 19, 96, 100, 2056, 4100}) {
        Matrix gate_up = Matrix(type(), 40, 2 * cols).random(1, 3), gate_up0(type(), 1, 1);
        gate_up.set(0, 0, 100);
        gate_up.set(1, 0, -100);
        gate_up.set(2, 0, -88);
        gate_up0 = gate_up;
        Matrix dy = Matrix(type(), 40, cols).random(2), dy0 = dy;
        Matrix y(type(), 40, cols), y0 = y;
        ops().swiglu_forward(gate_up.view(), y.view());
        oracle().swiglu_forward(gate_up0.view(), y0.view());
        expect_near(y, y0, 4);
        ops().swiglu_backward(dy.view(), gate_up.view());
        oracle().swiglu_backward(dy0.view(), gate_up0.view());
        expect_near(gate_up, gate_up0, 8);
        EXPECT_TRUE(dy.same_bytes(y));
    }
}

TEST_P(OpsRows, gelu_forward_and_backward) {
    // Rows at odd places, and at multiples of 16 bytes with and without something between them.
    for (const auto& [rows, cols, gap] : {std::array{40, 1, 3},
                                          {40, 19, 3},
                                          {40, 96, 3},
                                          {40, 100, 3},
                                          {40, 2056, 3},
                                          {40, 4100, 3},
                                          {41, 8, 0},
                                          {41, 2056, 8},
                                          {40, 6400, 8}}) {
        Matrix x = Matrix(type(), rows, cols, gap).random(1, 3), x0(type(), 1, 1);
        x.set(0, 0, 100);
        x.set(1, 0, -100);
        x.set(2, 0, -5);
        x0 = x;
        Matrix dy = Matrix(type(), rows, cols, gap).random(2), dy0 = dy;
        Matrix y(type(), rows, cols, gap), y0 = y;
        ops().gelu_forward(x.view(), y.view());
        oracle().gelu_forward(x0.view(), y0.view());
        expect_near(y, y0, 4);
        ops().gelu_backward(dy.view(), x.view());
        oracle().gelu_backward(dy0.view(), x0.view());
        expect_near(x, x0, 8);
        EXPECT_TRUE(dy.same_bytes(y));
    }
}

TEST_P(OpsRows, rope_turns_by_the_position_in_the_document) {
    const std::vector<double> frequencies{1, 0.25, 0.01};
    Rope rope{.sequence = 5, .heads = 2, .head_dim = 6, .frequencies = frequencies.data()};
    const Matrix before = Matrix(type(), 10, 12).random(1);
    Matrix plain = before;
    ops().rope(plain.view(), rope);
    rope.document_start = kDocumentStarts.data();
    Matrix x = before, x0 = before;
    ops().rope(x.view(), rope);
    oracle().rope(x0.view(), rope);
    expect_near(x, x0, 4);
    for (int64_t c = 0; c < 12; ++c) {
        EXPECT_EQ(x.get(1, c), plain.get(1, c));        // the first document
        EXPECT_EQ(x.get(8, c), plain.get(8, c));        // the other sequence
        EXPECT_EQ(x.get(2, c), before.get(2, c)) << c;  // position 0 is not turned
    }
    EXPECT_NE(x.get(4, 0), plain.get(4, 0));
    rope.inverse = true;
    ops().rope(x.view(), rope);
    expect_near(x, before, type() == DType::f32 ? 4 : 2e4);
}

TEST_P(OpsRows, rounded_gradient_and_leaves_are_the_oracle_s_bits) {
    for (const int64_t count : {1, 16, 4095, 4096, 4097, 70001}) {
        const Matrix sum = Matrix(DType::f32, 1, count).random(1, 3);
        Matrix wire(type(), 1, count), wire0 = wire;
        std::vector<float> leaves(static_cast<size_t>(ceil_div(count, 4096))), leaves0 = leaves;
        const auto* in = static_cast<const float*>(sum.view().data);
        ops().round_gradient(in, count, type(), wire.view().data, leaves.data());
        oracle().round_gradient(in, count, type(), wire0.view().data, leaves0.data());
        EXPECT_TRUE(wire.same_bytes(wire0));
        EXPECT_EQ(leaves, leaves0);
    }
}

TEST_P(OpsRows, sum_of_the_ranks_pieces_is_the_oracle_s_bits) {
    for (const int64_t count : {1, 16, 4095, 4096, 4097, 70001}) {
        for (const int64_t ranks : {1, 2, 3, 8}) {
            const Matrix pieces = Matrix(type(), ranks, count).random(1, 3);
            Matrix wire(type(), 1, count), wire0 = wire;
            std::vector<float> leaves(static_cast<size_t>(ceil_div(count, 4096))), leaves0 = leaves;
            ops().sum_gradient(pieces.view(), wire.view().data, leaves.data());
            oracle().sum_gradient(pieces.view(), wire0.view().data, leaves0.data());
            EXPECT_TRUE(wire.same_bytes(wire0));
            EXPECT_EQ(leaves, leaves0);
        }
    }
}

// Of ranks that share tensors the last ones add fewer rows than there is room for.
TEST_P(OpsRows, sum_of_pieces_with_room_behind_them_is_the_oracle_s_bits) {
    for (const auto& [count, room] : {std::pair{7, 21}, {4096, 4100}, {9001, 12345}}) {
        const Matrix pieces = Matrix(type(), 3, room).random(1, 3);
        const ops::ConstView own = pieces.view().col_range(0, count);
        Matrix wire(type(), 1, count), wire0 = wire;
        std::vector<float> leaves(static_cast<size_t>(ceil_div(count, 4096))), leaves0 = leaves;
        ops().sum_gradient(own, wire.view().data, leaves.data());
        oracle().sum_gradient(own, wire0.view().data, leaves0.data());
        EXPECT_TRUE(wire.same_bytes(wire0));
        EXPECT_EQ(leaves, leaves0);
    }
}

// A sum in another order, or one that is rounded on its way, gives another value.
TEST_P(OpsRows, ranks_pieces_are_added_in_order_and_rounded_once) {
    const float big = type() == DType::f32 ? 0x1p25F : 0x1p13F;
    const auto sum = [&](std::initializer_list<float> values) {
        Matrix pieces(type(), std::ssize(values), 1), wire(type(), 1, 1);
        int64_t rank = 0;
        for (const float value : values) pieces.set(rank++, 0, value);
        float leaf = 0;
        ops().sum_gradient(pieces.view(), wire.view().data, &leaf);
        return wire.get(0, 0);
    };
    const bool narrow = type() != DType::f32;
    EXPECT_EQ(sum({big, 1, -big}), narrow ? 1 : 0);  // fp32 holds 2^13 + 1, and not 2^25 + 1
    EXPECT_EQ(sum({big, -big, 1}), 1);
    EXPECT_TRUE(std::isnan(sum({INFINITY, 1, -INFINITY})));
    const float most = type() == DType::f16 ? 65504 : 0x1.fep127F;
    EXPECT_EQ(sum({most, most}), INFINITY);  // finite on each rank, and no longer as one value
}

TEST_P(OpsRows, add_cast_zero_are_exact) {
    Matrix a = Matrix(DType::f32, 1, 70003).random(1), a0 = a;
    const Matrix b = Matrix(DType::f32, 1, 70003).random(2);
    const auto at = [](Matrix& m) { return static_cast<float*>(m.view().data); };
    ops().add(at(a), static_cast<const float*>(b.view().data), 70003);
    oracle().add(at(a0), static_cast<const float*>(b.view().data), 70003);
    EXPECT_TRUE(a.same_bytes(a0));
    Matrix narrow(type(), 11, 37), narrow0 = narrow;
    const Matrix wide = Matrix(DType::f32, 11, 37).random(3);
    ops().cast(wide.view(), narrow.view());
    oracle().cast(wide.view(), narrow0.view());
    EXPECT_TRUE(narrow.same_bytes(narrow0));
    ops().fill_zero(at(a), 70003 * 4);
    oracle().fill_zero(at(a0), 70003 * 4);
    EXPECT_TRUE(a.same_bytes(a0));
}

TEST_P(OpsRows, rows_are_copied_out_and_nothing_beside_them) {
    const Matrix from = Matrix(type(), 11, 37).random(1);
    Matrix to(type(), 11, 37, 5), expected = to;
    ops().copy_out(from.view(), to.view());
    for (int64_t r = 0; r < 11; ++r) {
        for (int64_t c = 0; c < 37; ++c) expected.set(r, c, from.get(r, c));
    }
    EXPECT_TRUE(to.same_bytes(expected));
}

TEST_P(OpsRows, one_bad_element_is_found) {
    for (const auto& [rows, cols, gap] : {std::array{9, 37, 3}, {8, 64, 0}, {77, 648, 0}}) {
        const Matrix good = Matrix(type(), rows, cols, gap).random(1);
        uint32_t found = 0;
        ops().check_finite(good.view(), &found);
        EXPECT_EQ(found, 0u);
        for (const int64_t at : {int64_t{0}, int64_t{1}, int64_t{rows} * cols - 2,
                                 int64_t{rows} * cols - 1, int64_t{rows} * cols / 2}) {
            for (const float bad : {INFINITY, -INFINITY, NAN}) {
                Matrix x = good;
                x.set(at / cols, at % cols, bad);
                found = 4;
                ops().check_finite(x.view(), &found);
                EXPECT_EQ(found, 5u) << at << " of " << rows << " x " << cols;
            }
        }
    }
}

// The largest values of each type are none.
TEST_P(OpsRows, the_largest_elements_are_finite) {
    const float largest = type() == DType::f16 ? 65504.0f : 0x1.fep127f;
    for (const int64_t gap : {0, 3}) {
        const Matrix x = Matrix(type(), 16, 64, gap).fill(largest);
        uint32_t found = 0;
        ops().check_finite(x.view(), &found);
        EXPECT_EQ(found, 0u);
    }
}

TEST_P(OpsRows, nan_is_not_swallowed) {
    Matrix gate_up = Matrix(type(), 1, 32).fill(NAN), y(type(), 1, 16);
    ops().swiglu_forward(gate_up.view(), y.view());
    EXPECT_TRUE(std::isnan(y.get(0, 3)));
    Matrix logits = Matrix(DType::f32, 1, 40).random(1), d(type(), 1, 40);
    logits.set(0, 17, NAN);
    const int32_t target = 2;
    double loss = 0;
    auto room = scratch_of(ops().cross_entropy_scratch_bytes(1));
    ops().cross_entropy(logits.view(), &target, 1, d.view(), &loss, aligned(room));
    EXPECT_TRUE(std::isnan(loss));
}

INSTANTIATE_TEST_SUITE_P(All, OpsRows, every_implementation_and_type(), name_of_case);

}  // namespace
}  // namespace ferry::ops
