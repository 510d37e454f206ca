// Norms, of every implementation of Ops against the oracle, on odd sizes, for every type.
#include <gtest/gtest.h>

#include <array>
#include <utility>
#include <vector>

#include "tests/contract/ops_fixture.h"

namespace ferry::ops {
namespace {

class OpsNorms : public OpsContract {};

TEST_P(OpsNorms, norm_forward_and_backward) {
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
TEST_P(OpsNorms, gradient_of_a_norm_s_weight_does_not_depend_on_dx) {
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
TEST_P(OpsNorms, norm_of_every_head) {
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

TEST_P(OpsNorms, layer_norm_forward_and_backward) {
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
TEST_P(OpsNorms, norm_backward_of_many_rows) {
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
TEST_P(OpsNorms, how_rows_lie_changes_no_bit_of_a_norm_s_backward) {
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

// A norm of heads and the rotation of what it gave: in one pass where there is a kernel for it.
TEST_P(OpsNorms, norms_that_turn_give_what_a_norm_and_a_rotation_give) {
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

INSTANTIATE_TEST_SUITE_P(All, OpsNorms, every_implementation_and_type(), name_of_case);

}  // namespace
}  // namespace ferry::ops
