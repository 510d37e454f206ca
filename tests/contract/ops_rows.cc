// Operations on rows, of every implementation of Ops against the oracle, on odd sizes, for every
// type.
#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <limits>
#include <vector>

#include "tests/contract/ops_fixture.h"

namespace ferry::ops {
namespace {

class OpsRows : public OpsContract {};

TEST_P(OpsRows, norm_forward_and_backward) {
    // A width for each number of threads and of packs that the GPU gives a row.
    for (const auto& [tokens, hidden] : {std::pair{1, 1},
                                         {3, 17},
                                         {130, 96},
                                         {70, 1030},
                                         {9, 128},
                                         {5, 200},
                                         {67, 512},
                                         {3, 2048},
                                         {3, 4096},
                                         {3, 8184},
                                         {2, 8193},
                                         {2, 16400}}) {
        SCOPED_TRACE(hidden);
        const Matrix x = Matrix(DType::f32, tokens, hidden).random(1);
        const Matrix w = Matrix(type(), 1, hidden).random(2),
                     dy = Matrix(type(), tokens, hidden).random(3);
        Matrix y(type(), tokens, hidden), y0 = y;
        std::vector<float> r(static_cast<size_t>(tokens)), r0 = r;
        ops().norm_forward(x.view(), w.view(), 1e-5, y.view(), r.data());
        oracle().norm_forward(x.view(), w.view(), 1e-5, y0.view(), r0.data());
        expect_near(y, y0, 4);
        Matrix dx = Matrix(DType::f32, tokens, hidden).random(4), dx0 = dx;
        Matrix dw = Matrix(DType::f32, 1, hidden).random(5), dw0 = dw;
        auto scratch = scratch_of(ops().norm_backward_scratch_bytes(tokens, hidden));
        ops().norm_backward(dy.view(), x.view(), w.view(), r.data(), dx.view(), dx.view(),
                            static_cast<float*>(dw.view().data), aligned(scratch));
        oracle().norm_backward(dy.view(), x.view(), w.view(), r0.data(), dx0.view(), dx0.view(),
                               static_cast<float*>(dw0.view().data), nullptr);
        expect_near(dx, dx0, 8);
        expect_near(dw, dw0, 40);
        Matrix only(type(), tokens, hidden), only0 = only;
        ops().norm_backward(dy.view(), x.view(), w.view(), r.data(), {}, only.view(), nullptr,
                            nullptr);
        oracle().norm_backward(dy.view(), x.view(), w.view(), r0.data(), {}, only0.view(), nullptr,
                               nullptr);
        expect_near(only, only0, 8);
    }
}

// Nor dx on the gradient: a frozen layer changes no other's bits.
TEST_P(OpsRows, gradient_of_a_norm_s_weight_does_not_depend_on_dx) {
    const bool many = std::get<0>(GetParam()).threads == kGpu;
    std::vector<std::pair<int64_t, int64_t>> sizes{{130, 40}};
    if (many)
        sizes.insert(sizes.end(),
                     {{131083, 5}, {16449, 576}, {8193, 2056}, {8195, 4104}, {8200, 896}});
    for (const auto& [tokens, hidden] : sizes) {
        SCOPED_TRACE(hidden);
        const Matrix x = Matrix(hidden % 8 == 0 ? type() : DType::f32, tokens, hidden).random(1);
        const Matrix w = Matrix(type(), 1, hidden).random(2),
                     dy = Matrix(type(), tokens, hidden).random(3);
        std::vector<float> stats(static_cast<size_t>(2 * tokens));
        for (size_t i = 0; i < stats.size(); ++i)
            stats[i] = 0.5f + static_cast<float>(i % 7) * 0.25f;
        auto scratch = scratch_of(ops().norm_backward_scratch_bytes(tokens, hidden));
        for (const bool layer : {false, true}) {
            Matrix both = Matrix(DType::f32, 1, hidden).random(5), alone = both;
            Matrix dx(DType::f32, tokens, hidden), dx_alone = dx;
            const auto backward = [&](View to, Matrix* sums) {
                auto* gradient = sums ? static_cast<float*>(sums->view().data) : nullptr;
                layer ? ops().layer_norm_backward(dy.view(), x.view(), w.view(), stats.data(), {},
                                                  to, gradient, nullptr, aligned(scratch))
                      : ops().norm_backward(dy.view(), x.view(), w.view(), stats.data(), {}, to,
                                            gradient, aligned(scratch));
            };
            backward(dx.view(), &both);
            backward({}, &alone);
            backward(dx_alone.view(), nullptr);
            EXPECT_TRUE(both.same_bytes(alone));
            EXPECT_TRUE(dx.same_bytes(dx_alone));
        }
    }
}

// As the norm of each head's queries, in place in the backward pass.
TEST_P(OpsRows, norm_of_every_head) {
    for (const auto& [tokens, heads, n] :
         {std::array{3, 2, 5}, {50, 3, 48}, {9, 1, 64}, {21, 5, 96}, {33, 3, 128}}) {
        SCOPED_TRACE(n);
        const Matrix x = Matrix(type(), tokens, heads * n).random(1);
        const Matrix w = Matrix(type(), 1, n).random(2);
        Matrix y(type(), tokens, heads * n), y0 = y;
        std::vector<float> r(static_cast<size_t>(tokens * heads)), r0 = r;
        ops().norm_forward(x.view(), w.view(), 1e-6, y.view(), r.data());
        oracle().norm_forward(x.view(), w.view(), 1e-6, y0.view(), r0.data());
        expect_near(y, y0, 4);
        Matrix dy = Matrix(type(), tokens, heads * n).random(3), dy0 = dy;
        Matrix dw = Matrix(DType::f32, 1, n).random(5), dw0 = dw;
        auto scratch = scratch_of(ops().norm_backward_scratch_bytes(tokens * heads, n));
        ops().norm_backward(dy.view(), x.view(), w.view(), r.data(), {}, dy.view(),
                            static_cast<float*>(dw.view().data), aligned(scratch));
        oracle().norm_backward(dy0.view(), x.view(), w.view(), r0.data(), {}, dy0.view(),
                               static_cast<float*>(dw0.view().data), nullptr);
        expect_near(dy, dy0, 8);
        expect_near(dw, dw0, 40);
    }
}

TEST_P(OpsRows, layer_norm_forward_and_backward) {
    for (const auto& [tokens, hidden] : {std::pair{1, 2}, {3, 17}, {130, 96}, {70, 1030}}) {
        SCOPED_TRACE(hidden);
        Matrix x = Matrix(DType::f32, tokens, hidden).random(1);
        for (int64_t c = 0; c < hidden; ++c) x.set(0, c, x.get(0, c) + 30);  // far from zero
        const Matrix w = Matrix(type(), 1, hidden).random(2),
                     b = Matrix(type(), 1, hidden).random(6);
        const Matrix dy = Matrix(type(), tokens, hidden).random(3);
        Matrix y(type(), tokens, hidden), y0 = y;
        std::vector<float> s(static_cast<size_t>(2 * tokens)), s0 = s;
        ops().layer_norm_forward(x.view(), w.view(), b.view(), 1e-5, y.view(), s.data());
        oracle().layer_norm_forward(x.view(), w.view(), b.view(), 1e-5, y0.view(), s0.data());
        expect_near(y, y0, hidden == 2 ? 400 : 40);  // of two elements the rstd can be large
        Matrix dx = Matrix(DType::f32, tokens, hidden).random(4), dx0 = dx;
        Matrix dw = Matrix(DType::f32, 1, hidden).random(5), dw0 = dw;
        Matrix db = Matrix(DType::f32, 1, hidden).random(6), db0 = db;
        auto scratch = scratch_of(ops().layer_norm_backward_scratch_bytes(tokens, hidden));
        ops().layer_norm_backward(dy.view(), x.view(), w.view(), s.data(), dx.view(), dx.view(),
                                  static_cast<float*>(dw.view().data),
                                  static_cast<float*>(db.view().data), aligned(scratch));
        oracle().layer_norm_backward(dy.view(), x.view(), w.view(), s0.data(), dx0.view(),
                                     dx0.view(), static_cast<float*>(dw0.view().data),
                                     static_cast<float*>(db0.view().data), nullptr);
        expect_near(dx, dx0, 40);
        expect_near(dw, dw0, 40);
        expect_near(db, db0, 40);
        Matrix only(type(), tokens, hidden), only0 = only;
        ops().layer_norm_backward(dy.view(), x.view(), w.view(), s.data(), {}, only.view(), nullptr,
                                  nullptr, nullptr);
        oracle().layer_norm_backward(dy.view(), x.view(), w.view(), s0.data(), {}, only0.view(),
                                     nullptr, nullptr, nullptr);
        expect_near(only, only0, 40);
    }
}

// As many rows as a GPU's blocks sum the weight's gradient of, for each number of threads and packs
// of a row, with and without what is added; the last block is not full.
TEST_P(OpsRows, norm_backward_of_many_rows) {
    if (std::get<0>(GetParam()).threads != kGpu) GTEST_SKIP() << "of the GPU's blocks";
    for (const auto& [tokens, runs, n] : {std::array{3850, 17, 128},
                                          {4099, 16, 24},
                                          {8195, 1, 264},
                                          {8195, 1, 776},
                                          {4099, 1, 1032},
                                          {4099, 1, 1544},
                                          {4099, 1, 2056},
                                          {4099, 1, 3080},
                                          {4099, 1, 4104}}) {
        SCOPED_TRACE(n);
        const int64_t cols = int64_t{runs} * n;
        // Rows at multiples of 16 bytes, as a model's are, and at odd places.
        for (const int64_t gap : {8, 3}) {
            if (gap == 3 && n > 300) continue;
            const Matrix x = Matrix(type(), tokens, cols, gap).random(1);
            const Matrix w = Matrix(type(), 1, n).random(2);
            const Matrix dy = Matrix(type(), tokens, cols, gap).random(3);
            Matrix dx = Matrix(type(), tokens, cols, gap).random(4), dx0(type(), 1, 1);
            Matrix dw = Matrix(DType::f32, 1, n).random(5), dw0(DType::f32, 1, 1);
            std::vector<float> stats(static_cast<size_t>(2 * tokens * runs));
            for (size_t i = 0; i < stats.size(); ++i)
                stats[i] = 0.5f + static_cast<float>(i % 7) * 0.25f;
            Matrix db = Matrix(DType::f32, 1, n).random(6), db0 = db;
            auto scratch = scratch_of(ops().layer_norm_backward_scratch_bytes(tokens * runs, n));
            const auto both = [&](Ops& by, Matrix& to, Matrix& sums, Matrix& bias_sums,
                                  bool layer) {
                auto* gradient = static_cast<float*>(sums.view().data);
                auto* of_bias = static_cast<float*>(bias_sums.view().data);
                const ConstView addend = runs == 1 ? ConstView(to.view()) : ConstView{};
                layer ? by.layer_norm_backward(dy.view(), x.view(), w.view(), stats.data(), addend,
                                               to.view(), gradient, of_bias, aligned(scratch))
                      : by.norm_backward(dy.view(), x.view(), w.view(), stats.data(), addend,
                                         to.view(), gradient, aligned(scratch));
            };
            for (const bool layer : {false, true}) {
                if (layer && runs > 1) continue;
                dx0 = dx;
                dw0 = dw;
                db0 = db;
                both(ops(), dx, dw, db, layer);
                both(oracle(), dx0, dw0, db0, layer);
                expect_near(dx, dx0, 200);
                expect_near(dw, dw0, 2000);
                expect_near(db, db0, 2000);
            }
        }
    }
}

// However rows lie, and whatever kernel that asks for, sums are added in one order: of rows at
// multiples of 16 bytes and at odd places, of the lengths that a GPU's threads share differently.
TEST_P(OpsRows, how_rows_lie_changes_no_bit_of_a_norm_s_backward) {
    if (std::get<0>(GetParam()).threads != kGpu) GTEST_SKIP() << "of the GPU's kernels";
    for (const auto& [tokens, runs, n] : {std::array{3850, 17, 128},
                                          {4099, 16, 24},
                                          {8195, 1, 264},
                                          {8195, 1, 768},
                                          {8195, 1, 896},
                                          {8195, 1, 1000},
                                          {4099, 1, 1536},
                                          {4099, 1, 1600},
                                          {4099, 1, 3072},
                                          {4099, 1, 4096},
                                          {4099, 1, 8192}}) {
        SCOPED_TRACE(n);
        const int64_t cols = int64_t{runs} * n, rows = int64_t{tokens} * runs;
        std::vector<float> stats(static_cast<size_t>(2 * rows));
        for (size_t i = 0; i < stats.size(); ++i)
            stats[i] = 0.5f + static_cast<float>(i % 7) * 0.25f;
        auto scratch = scratch_of(ops().layer_norm_backward_scratch_bytes(rows, n));
        for (const bool layer : {false, true}) {
            if (layer && runs > 1) continue;
            std::vector<Matrix> dx, sums;
            for (const int64_t gap : {8, 3}) {
                const Matrix x = Matrix(type(), tokens, cols, gap).random(1);
                const Matrix w = Matrix(type(), 1, n, gap).random(2);
                const Matrix dy = Matrix(type(), tokens, cols, gap).random(3);
                dx.push_back(Matrix(type(), tokens, cols, gap).random(4));
                sums.push_back(Matrix(DType::f32, 2, n, 0).random(5));
                const View to = dx.back().view();
                const auto sum = [&](int64_t row) {
                    return static_cast<float*>(sums.back().view().row_range(row, 1).data);
                };
                const ConstView addend = runs == 1 ? ConstView(to) : ConstView{};
                layer ? ops().layer_norm_backward(dy.view(), x.view(), w.view(), stats.data(),
                                                  addend, to, sum(0), sum(1), aligned(scratch))
                      : ops().norm_backward(dy.view(), x.view(), w.view(), stats.data(), addend, to,
                                            sum(0), aligned(scratch));
            }
            EXPECT_TRUE(dx[0].same_values(dx[1])) << layer;
            EXPECT_TRUE(sums[0].same_bytes(sums[1])) << layer;
        }
    }
}

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

// Rows of a token among many others, some of them next to each other.
TEST_P(OpsRows, gradient_of_an_embedding_is_summed_in_the_order_of_its_tokens) {
    // More rows than a GPU sorts in one block, too; few tokens with many rows, and many with few.
    for (const auto& [rows, hidden, vocab] : {std::array{1300, 5, 41},
                                              {1300, 96, 41},
                                              {1300, 1032, 41},
                                              {20011, 20, 41},
                                              {1301, 96, 1301},
                                              {2001, 1032, 701}}) {
        std::vector<int32_t> tokens;
        for (int64_t t = 0; t < rows; ++t)
            tokens.push_back(static_cast<int32_t>(vocab == 41 && t % 3 == 0 ? 7 : t * t % vocab));
        const Matrix dx = Matrix(type(), std::ssize(tokens), hidden).random(2);
        SCOPED_TRACE(std::to_string(hidden) + " of " + std::to_string(vocab));
        Matrix g = Matrix(DType::f32, vocab, hidden, 0).random(3), g0 = g;
        ops().embed_backward(tokens.data(), dx.view(), static_cast<float*>(g.view().data), nullptr);
        oracle().embed_backward(tokens.data(), dx.view(), static_cast<float*>(g0.view().data),
                                nullptr);
        EXPECT_TRUE(g.same_bytes(g0));
    }
}

// theta^(-2 i / head_dim)
std::vector<double> frequencies_of(int64_t head_dim) {
    std::vector<double> f;
    for (int64_t i = 0; i < head_dim / 2; ++i)
        f.push_back(std::pow(1e4, -2.0 * static_cast<double>(i) / static_cast<double>(head_dim)));
    return f;
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

// A norm of heads and the rotation of what it gave: in one pass where there is a kernel for it.
TEST_P(OpsRows, norms_that_turn_give_what_a_norm_and_a_rotation_give) {
    for (const auto& [tokens, heads, n] : {std::array{12, 2, 6},
                                           {7, 3, 64},
                                           {21, 5, 128},
                                           {2051, 17, 128},
                                           {4099, 16, 128},
                                           {8201, 8, 128}}) {
        if (tokens > 100 && std::get<0>(GetParam()).threads != kGpu) continue;  // of its blocks
        // At odd places, and at multiples of 16 bytes, as a model's are.
        for (const auto& [documents, gap] :
             {std::pair<bool, int64_t>{false, 3}, {true, 3}, {false, 8}, {true, 8}}) {
            SCOPED_TRACE(std::to_string(tokens) + " x " + std::to_string(n));
            const std::vector<double> frequencies = frequencies_of(n);
            const int64_t sequence = tokens / 2 + 1;
            std::vector<int32_t> starts;
            for (int64_t t = 0; t < tokens; ++t) starts.push_back(t % sequence < 5 ? 0 : 5);
            Rope rope{.sequence = sequence,
                      .heads = heads,
                      .head_dim = n,
                      .frequencies = frequencies.data(),
                      .amplitude = 1.25,
                      .document_start = documents ? starts.data() : nullptr};
            std::vector<float> angles(static_cast<size_t>(ops().rope_angles_floats(rope)));
            ops().rope_angles(rope, angles.data());
            const Matrix x = Matrix(type(), tokens, int64_t{heads} * n, gap).random(1);
            const Matrix w = Matrix(type(), 1, n, gap).random(2);
            Matrix y(type(), tokens, int64_t{heads} * n, gap), y0 = y;
            std::vector<float> r(static_cast<size_t>(tokens * heads)), r0 = r;
            ops().norm_rope_forward(x.view(), w.view(), 1e-6, y.view(), r.data(), rope,
                                    angles.data());
            ops().norm_forward(x.view(), w.view(), 1e-6, y0.view(), r0.data());
            ops().rope(y0.view(), rope);
            EXPECT_TRUE(y.same_bytes(y0));
            EXPECT_EQ(r, r0);
            rope.inverse = true;
            Matrix d = Matrix(type(), tokens, int64_t{heads} * n, gap).random(3), d0 = d;
            Matrix dw = Matrix(DType::f32, 1, n).random(4), dw0 = dw;
            auto scratch = scratch_of(ops().norm_backward_scratch_bytes(tokens * heads, n));
            ops().norm_rope_backward(d.view(), x.view(), w.view(), r.data(),
                                     static_cast<float*>(dw.view().data), rope, angles.data(),
                                     aligned(scratch));
            ops().rope(d0.view(), rope);
            ops().norm_backward(d0.view(), x.view(), w.view(), r.data(), {}, d0.view(),
                                static_cast<float*>(dw0.view().data), aligned(scratch));
            EXPECT_TRUE(d.same_bytes(d0));
            EXPECT_TRUE(dw.same_bytes(dw0));
        }
    }
}

TEST_P(OpsRows, positions_are_added_and_their_gradient_summed) {
    const std::vector<int32_t> tokens{4, 0, 4, 4, 2, 6};
    const Matrix table = Matrix(type(), 7, 150, 0).random(1);
    const Matrix positions = Matrix(type(), 3, 150).random(2),
                 dx = Matrix(type(), 6, 150).random(3);
    Matrix x(DType::f32, 6, 150), x0 = x;
    ops().embed(tokens.data(), table.view(), positions.view(), nullptr, x.view());
    oracle().embed(tokens.data(), table.view(), positions.view(), nullptr, x0.view());
    EXPECT_TRUE(x.same_bytes(x0));
    Matrix g = Matrix(DType::f32, 3, 150, 0).random(4), g0 = g;
    ops().positions_backward(dx.view(), 3, nullptr, static_cast<float*>(g.view().data), nullptr);
    oracle().positions_backward(dx.view(), 3, nullptr, static_cast<float*>(g0.view().data),
                                nullptr);
    EXPECT_TRUE(g.same_bytes(g0));
}

// Two sequences of five tokens, of two documents and of one.
const std::vector<int32_t> kDocumentStarts{0, 0, 2, 2, 2, 0, 0, 0, 0, 0};

TEST_P(OpsRows, positions_begin_anew_with_each_document) {
    const std::vector<int32_t> tokens{4, 0, 4, 4, 2, 6, 1, 1, 0, 3};
    const Matrix table = Matrix(type(), 7, 150, 0).random(1);
    const Matrix positions = Matrix(type(), 5, 150).random(2),
                 dx = Matrix(type(), 10, 150).random(3);
    Matrix x(DType::f32, 10, 150), x0 = x;
    ops().embed(tokens.data(), table.view(), positions.view(), kDocumentStarts.data(), x.view());
    oracle().embed(tokens.data(), table.view(), positions.view(), kDocumentStarts.data(),
                   x0.view());
    EXPECT_TRUE(x.same_bytes(x0));
    EXPECT_FLOAT_EQ(x.get(2, 0), table.get(4, 0) + positions.get(0, 0));
    Matrix g = Matrix(DType::f32, 5, 150, 0).random(4), g0 = g;
    const Matrix before = g;
    ops().positions_backward(dx.view(), 5, kDocumentStarts.data(),
                             static_cast<float*>(g.view().data), nullptr);
    oracle().positions_backward(dx.view(), 5, kDocumentStarts.data(),
                                static_cast<float*>(g0.view().data), nullptr);
    EXPECT_TRUE(g.same_bytes(g0));
    EXPECT_NEAR(g.get(3, 7) - before.get(3, 7), dx.get(8, 7), 1e-5);  // one row is that far
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

TEST_P(OpsRows, embedding_rows_and_their_gradient) {
    const std::vector<int32_t> tokens{4, 0, 4, 4, 2, 6, 0};
    const Matrix table = Matrix(type(), 7, 150, 0).random(1), dx = Matrix(type(), 7, 150).random(2);
    Matrix x(DType::f32, 7, 150), x0 = x;
    ops().embed(tokens.data(), table.view(), {}, nullptr, x.view());
    oracle().embed(tokens.data(), table.view(), {}, nullptr, x0.view());
    EXPECT_TRUE(x.same_bytes(x0));
    Matrix g = Matrix(DType::f32, 7, 150, 0).random(3), g0 = g;
    ops().embed_backward(tokens.data(), dx.view(), static_cast<float*>(g.view().data), nullptr);
    oracle().embed_backward(tokens.data(), dx.view(), static_cast<float*>(g0.view().data), nullptr);
    EXPECT_TRUE(g.same_bytes(g0));
}

TEST_P(OpsRows, cross_entropy_ignores_masked_rows) {
    std::vector<int64_t> sizes{1, 5, 37, 1100, 4096, 4097, 9000};
    // Two blocks a row on a GPU with clusters, three, the most of them, and too long a row.
    const bool blocks = std::get<0>(GetParam()).threads == kGpu;
    if (blocks) sizes.insert(sizes.end(), {20480, 20481, 50257, 128256, 151936, 163841});
    for (const int64_t vocab : sizes) {
        const Matrix logits = Matrix(DType::f32, 9, vocab).random(1, 5);
        std::vector<int32_t> targets(9);
        for (size_t i = 0; i < 9; ++i)
            targets[i] =
                i % 3 == 1 ? -1 : static_cast<int32_t>((i * 7) % static_cast<size_t>(vocab));
        auto room = scratch_of(ops().cross_entropy_scratch_bytes(9));
        Matrix d(type(), 9, vocab), d0 = d;
        double loss = 1, loss0 = 1;
        ops().cross_entropy(logits.view(), targets.data(), 0.5f, d.view(), &loss, aligned(room));
        oracle().cross_entropy(logits.view(), targets.data(), 0.5f, d0.view(), &loss0, nullptr);
        EXPECT_NEAR(loss, loss0, 1e-5);
        expect_near(d, d0, 0.5);
        Matrix in_place = logits;
        double again = 1;
        ops().cross_entropy(in_place.view(), targets.data(), 0.5f, in_place.view(), &again,
                            aligned(room));
        EXPECT_EQ(again, loss);
        double without = 1;
        ops().cross_entropy(logits.view(), targets.data(), 0.5f, {}, &without, aligned(room));
        EXPECT_EQ(without, loss);
    }
}

// Ranks that have some rows of a table each: one has a token's row, the others give zeros and leave
// their gradients alone.
TEST_P(OpsRows, embedding_rows_of_several_ranks_are_those_of_one) {
    const std::vector<int32_t> tokens{4, 0, -1, 4, 2, 6, 0};
    const Matrix table = Matrix(type(), 7, 150, 0).random(1), dx = Matrix(type(), 7, 150).random(2);
    const Matrix before = Matrix(DType::f32, 7, 150, 0).random(3);
    Matrix whole(DType::f32, 7, 150), gradient = before, all = before;
    oracle().embed(tokens.data(), table.view(), {}, nullptr, whole.view());
    oracle().embed_backward(tokens.data(), dx.view(), static_cast<float*>(gradient.view().data),
                            nullptr);
    std::vector<int> holders(7);
    for (const auto& [first, rows] : {std::pair{0, 2}, {2, 3}, {5, 2}}) {
        std::vector<int32_t> own(7);
        ops().own_rows(tokens.data(), 7, first, rows, own.data());
        Matrix x(DType::f32, 7, 150);
        ops().embed(own.data(), table.view().row_range(first, rows), {}, nullptr, x.view());
        for (int64_t t = 0; t < 7; ++t) {
            const int32_t row = tokens[static_cast<size_t>(t)] - first;
            const bool here = row >= 0 && row < rows;
            EXPECT_EQ(own[static_cast<size_t>(t)], here ? row : -1);
            holders[static_cast<size_t>(t)] += here;
            for (int64_t c = 0; c < 150; ++c)
                ASSERT_EQ(x.get(t, c), here ? whole.get(t, c) : 0) << t << ", " << c;
        }
        auto room = scratch_of(ops().embed_backward_scratch_bytes(7));
        auto* const rows_of_all = static_cast<float*>(all.view().row_range(first, rows).data);
        ops().embed_backward(own.data(), dx.view(), rows_of_all, aligned(room));
    }
    EXPECT_EQ(holders, (std::vector<int>{1, 1, 0, 1, 1, 1, 1}));
    EXPECT_TRUE(all.same_bytes(gradient));
}

// Each rank's columns, and what all tell of theirs.
TEST_P(OpsRows, cross_entropy_of_parts_is_that_of_the_whole) {
    constexpr int64_t kTokens = 9, kTold = ops::Ops::kLossParts;
    for (const auto& [vocab, ranks] : {std::pair{5, 4}, {37, 2}, {1100, 3}, {4097, 4}, {9000, 1}}) {
        SCOPED_TRACE(testing::Message() << vocab << " over " << ranks);
        const Matrix logits = Matrix(DType::f32, kTokens, vocab).random(1, 5);
        std::vector<int32_t> targets(kTokens);
        for (size_t i = 0; i < targets.size(); ++i)
            targets[i] = i % 3 == 1 ? -1 : static_cast<int32_t>(i * 1237) % vocab;
        auto room = scratch_of(ops().cross_entropy_scratch_bytes(kTokens));
        Matrix whole(type(), kTokens, vocab);
        double loss = 1;
        oracle().cross_entropy(logits.view(), targets.data(), 0.5f, whole.view(), &loss, nullptr);
        const auto first = [vocab = vocab, ranks = ranks](int rank) {
            return vocab * rank / ranks;
        };
        std::vector<double> told(static_cast<size_t>(ranks * kTokens * kTold));
        std::vector<std::vector<int32_t>> own(static_cast<size_t>(ranks));
        const auto part = [&](int rank) {
            return logits.view().col_range(first(rank), first(rank + 1) - first(rank));
        };
        for (int rank = 0; rank < ranks; ++rank) {
            std::vector<int32_t>& its = own[static_cast<size_t>(rank)];
            its.resize(targets.size());
            ops().own_rows(targets.data(), kTokens, first(rank), part(rank).cols, its.data());
            ops().loss_parts(part(rank), its.data(),
                             &told[static_cast<size_t>(rank * kTokens * kTold)]);
        }
        std::vector<double> losses;
        for (int rank = 0; rank < ranks; ++rank) {
            const ops::Ops::LossTargets of{targets.data(), own[static_cast<size_t>(rank)].data()};
            Matrix d(type(), kTokens, part(rank).cols), expected = d;
            double found = 1, without = 1;
            ops().cross_entropy_of_parts(part(rank), of, told.data(), ranks, 0.5f, d.view(), &found,
                                         aligned(room));
            ops().cross_entropy_of_parts(part(rank), of, told.data(), ranks, 0.5f, {}, &without,
                                         aligned(room));
            oracle().cast(whole.view().col_range(first(rank), d.view().cols), expected.view());
            expect_near(d, expected, 0.5);
            EXPECT_EQ(found, without);
            losses.push_back(found);
        }
        EXPECT_NEAR(losses.front(), loss, 1e-5);
        for (const double its : losses) EXPECT_EQ(its, losses.front());
    }
}

// More rows than a GPU's blocks have at once, so that each block has several: what a row gets is
// what it gets alone.
TEST_P(OpsRows, cross_entropy_of_many_rows_is_that_of_each) {
    if (std::get<0>(GetParam()).threads != kGpu) GTEST_SKIP() << "of the GPU's blocks";
    for (const auto& [rows, vocab] :
         {std::pair{1100, 1001}, {1100, 1000}, {301, 20484}, {150, 90001}}) {
        SCOPED_TRACE(vocab);
        const Matrix logits = Matrix(DType::f32, rows, vocab).random(1, 5);
        std::vector<int32_t> targets;
        for (int64_t i = 0; i < rows; ++i)
            targets.push_back(i % 5 == 1 ? -1 : static_cast<int32_t>(i * 97 % vocab));
        auto room = scratch_of(ops().cross_entropy_scratch_bytes(rows));
        Matrix d(type(), rows, vocab), in_place = logits;
        double loss = 0, again = 0, sum = 0;
        ops().cross_entropy(logits.view(), targets.data(), 0.5f, d.view(), &loss, aligned(room));
        ops().cross_entropy(in_place.view(), targets.data(), 0.5f, in_place.view(), &again,
                            aligned(room));
        EXPECT_EQ(again, loss);
        for (int64_t i = 0; i < rows; ++i) {
            Matrix alone(type(), 1, vocab);
            double own = 0;
            ops().cross_entropy(logits.view().row_range(i, 1), &targets[static_cast<size_t>(i)],
                                0.5f, alone.view(), &own, aligned(room));
            sum += own;
            if (i % 11 != 0) continue;  // all rows take long
            for (int64_t c = 0; c < vocab; ++c) {
                ASSERT_EQ(d.get(i, c), alone.get(0, c)) << i << ", " << c;
                if (type() == DType::f32) {
                    ASSERT_EQ(in_place.get(i, c), alone.get(0, c)) << i << ", " << c;
                }
            }
        }
        EXPECT_NEAR(loss, sum, 1e-9 * std::abs(sum));
    }
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
