// Muon's update of one matrix: what orthogonalising does, and that its bits depend on the matrix
// alone.
#include "train/kernels/muon.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <utility>
#include <vector>

namespace ferry::train {
namespace {

float value_at(int64_t i) {
    auto x = static_cast<uint32_t>(i + 1) * 0x9E3779B1u;
    x ^= x >> 15;
    x *= 0x2C1B3C6Du;
    x ^= x >> 12;
    x *= 0x297A2D39u;
    x ^= x >> 15;
    return (static_cast<float>(x >> 8) * 0x1p-24f - 0.5f) * 0.25f;
}

// A matrix with all that an update of it needs; `format` says which arrays.
struct Matrix {
    int64_t rows, cols, count;
    std::vector<float> p, g;
    std::vector<std::byte> m;
    std::vector<uint16_t> weight, low;
    std::vector<float> scales;
    StateFormat format;

    Matrix(int64_t rows_in, int64_t cols_in, StateFormat kept = {.moments = 1})
        : rows(rows_in),
          cols(cols_in),
          count(round_up(rows * cols, optim::kLeaf)),
          p(static_cast<size_t>(count)),
          g(static_cast<size_t>(count)),
          m(static_cast<size_t>(count * size_of(kept.moment_type))),
          weight(static_cast<size_t>(count)),
          low(static_cast<size_t>(count)),
          scales(static_cast<size_t>(count / kMomentBlock), 1e-12f),
          format(kept) {
        for (int64_t i = 0; i < rows * cols; ++i) {
            p[static_cast<size_t>(i)] = value_at(3 * i);
            g[static_cast<size_t>(i)] = value_at(7 * i + 1);
        }
        for (size_t i = 0; i < p.size(); ++i) {
            const optim::Halves halves = optim::split(std::bit_cast<uint32_t>(p[i]));
            weight[i] = halves.weight, low[i] = halves.low;
        }
        if (kept.moment_type == MomentType::int8) {
            const float zero = 0;
            uint8_t code = 0;
            optim::encode_block(optim::Map::with_sign, {&zero, 1}, &code, &zero_scale_);
            std::memset(m.data(), code, m.size());
        }
    }

    optim::Span into(Matrix& to) {
        optim::Span span{.count = count,
                         .gradient = g.data(),
                         .moment_type = format.moment_type,
                         .m_in = m.data(),
                         .m = to.m.data(),
                         .weight = to.weight.data(),
                         .weight_type = DType::bf16};
        if (format.moment_type == MomentType::int8)
            span.m_scale_in = scales.data(), span.m_scale = to.scales.data();
        if (format.split) {
            span.weight_in = weight.data();
            span.low_in = low.data(), span.low = to.low.data();
        } else {
            span.p_in = p.data(), span.p = to.p.data();
        }
        return span;
    }

    bool operator==(const Matrix& other) const {
        return p == other.p && m == other.m && weight == other.weight && low == other.low &&
               scales == other.scales;
    }

private:
    float zero_scale_ = 0;
};

optim::Scalars scalars(int64_t step = 1, double gradient_scale = 1) {
    return optim::scalars_of({.method = optim::Method::muon,
                              .lr = 0.02,
                              .weight_decay = 0.1,
                              .momentum = 0.95,
                              .nesterov = true},
                             step, gradient_scale);
}

void update(Matrix& from, Matrix& to, int threads, const optim::Scalars& by) {
    NodeTeams teams(*this_machine(), threads);
    std::vector<std::byte> room(
        static_cast<size_t>(
            planner::workspace_of(from.rows, from.cols, from.count, DType::f32).bytes()),
        std::byte{0xff});  // it may hold anything
    Muon muon({}, teams, room);
    muon.update(from.rows, from.cols, from.into(to), by);
}

// Jordan's coefficients bring singular values near 1, most of them between 0.7 and 1.2. The squares
// of a matrix add up to those of its singular values.
TEST(Muon, BringsSingularValuesNearOne) {
    constexpr std::pair<int64_t, int64_t> kShapes[] = {
        {32, 96}, {96, 32}, {48, 48}, {1, 64}, {130, 7}};
    for (const auto& [rows, cols] : kShapes) {
        const int64_t count = round_up(rows * cols, optim::kLeaf);
        const planner::MatrixWorkspace at = planner::workspace_of(rows, cols, count, DType::f32);
        std::vector<std::byte> room(static_cast<size_t>(at.bytes()));
        NodeTeams teams(*this_machine(), 2);
        NewtonSchulz iteration({}, ops::make_cpu_matrix_kernels(teams.all()), room, 0);
        auto* x = reinterpret_cast<float*>(room.data());
        for (int64_t i = 0; i < rows * cols; ++i) x[i] = value_at(i);
        const float* o = iteration.orthogonalise(rows, cols, count);
        double squares = 0;
        for (int64_t i = 0; i < rows * cols; ++i) squares += double{o[i]} * o[i];
        const double mean = std::sqrt(squares / static_cast<double>(at.side));
        EXPECT_GT(mean, 0.65) << rows << " x " << cols;
        EXPECT_LT(mean, 1.25) << rows << " x " << cols;
        for (int64_t i = rows * cols; i < count; ++i) ASSERT_EQ(o[i], 0);
    }
}

// The coefficients 1.5, -0.5, 0 do bring them to 1: rows of a wide matrix become orthonormal.
TEST(Muon, ConvergesWithCoefficientsThatDo) {
    constexpr int64_t kRows = 8, kCols = 24;
    const int64_t count = optim::kLeaf;
    std::vector<std::byte> room(
        static_cast<size_t>(planner::workspace_of(kRows, kCols, count, DType::f32).bytes()));
    NodeTeams teams(*this_machine(), 1);
    NewtonSchulz iteration({.ns_steps = 30, .ns_coefficients = {1.5, -0.5, 0}},
                           ops::make_cpu_matrix_kernels(teams.all()), room, 0);
    auto* x = reinterpret_cast<float*>(room.data());
    for (int64_t i = 0; i < kRows * kCols; ++i) x[i] = value_at(i);
    const float* o = iteration.orthogonalise(kRows, kCols, count);
    for (int64_t r = 0; r < kRows; ++r) {
        for (int64_t s = 0; s < kRows; ++s) {
            double dot = 0;
            for (int64_t c = 0; c < kCols; ++c) dot += double{o[r * kCols + c]} * o[s * kCols + c];
            EXPECT_NEAR(dot, r == s ? 1 : 0, 1e-5) << r << ", " << s;
        }
    }
}

// Threads, and whether the update is in place, change no bit, in any format.
TEST(Muon, BitsFollowFromTheMatrixAlone) {
    constexpr std::pair<int64_t, int64_t> kShapes[] = {{96, 160}, {160, 96}, {700, 33}};
    for (const auto& [rows, cols] : kShapes) {
        for (const MomentType moment : {MomentType::f32, MomentType::bf16, MomentType::int8}) {
            for (const bool split : {false, true}) {
                const StateFormat format{.moments = 1, .moment_type = moment, .split = split};
                Matrix one(rows, cols, format), old(rows, cols, format), fresh(rows, cols, format);
                for (int64_t step = 1; step <= 3; ++step) update(one, one, 1, scalars(step));
                update(old, old, 3, scalars(1));
                update(old, old, 2, scalars(2));
                const Matrix before = old;
                update(old, fresh, 3, scalars(3));
                EXPECT_EQ(old, before) << "the old version is left alone";
                EXPECT_EQ(fresh, one) << rows << " x " << cols << ", " << name_of(moment) << split;
            }
        }
    }
}

// The master of a split one is the same fp32 number.
TEST(Muon, SplitMasterIsTheWholeOne) {
    Matrix whole(40, 56), halves(40, 56, {.moments = 1, .split = true});
    for (int64_t step = 1; step <= 3; ++step) {
        update(whole, whole, 2, scalars(step));
        update(halves, halves, 2, scalars(step));
    }
    for (size_t i = 0; i < whole.p.size(); ++i)
        ASSERT_EQ(std::bit_cast<uint32_t>(whole.p[i]),
                  optim::join({halves.weight[i], halves.low[i]}));
}

// What a clip factor or a loss scale does is within the momentum: it does not scale the update.
TEST(Muon, FirstUpdateDoesNotDependOnTheGradientsSize) {
    Matrix large(32, 64), small(32, 64);
    update(large, large, 1, scalars(1, 1));
    update(small, small, 1, scalars(1, 0x1p-10));
    EXPECT_EQ(large.p, small.p);
    EXPECT_NE(large.m, small.m);
}

// A gradient of zeros leaves but the decay; one that is not finite, NaN, which is never committed.
TEST(Muon, ZerosAndWhatIsNotFinite) {
    Matrix zeros(24, 40), broken(24, 40);
    std::ranges::fill(zeros.g, 0.0f);
    const std::vector<float> before = zeros.p;
    update(zeros, zeros, 1, scalars());
    for (size_t i = 0; i < before.size(); ++i)
        EXPECT_NEAR(zeros.p[i], before[i] * (1 - 0.02 * 0.1), 1e-8);
    broken.g[5] = std::numeric_limits<float>::quiet_NaN();
    update(broken, broken, 1, scalars());
    EXPECT_TRUE(std::isnan(broken.p[0]));
}

TEST(Muon, FactorsOfTheLearningRateAreTorchs) {
    using enum optim::AdjustLr;
    EXPECT_DOUBLE_EQ(optim::adjust_lr_factor(original, 64, 16), 2);
    EXPECT_DOUBLE_EQ(optim::adjust_lr_factor(original, 16, 64), 1);
    EXPECT_DOUBLE_EQ(optim::adjust_lr_factor(match_rms_adamw, 16, 64), 1.6);
    EXPECT_DOUBLE_EQ(optim::adjust_lr_factor(spectral_unclamped, 16, 64), 0.5);
}

}  // namespace
}  // namespace ferry::train
