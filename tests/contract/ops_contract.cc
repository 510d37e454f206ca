// Every implementation of Ops against the oracle, on odd sizes, for every type, and bit for bit
// between one and two threads and between alignments.
#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <functional>
#include <vector>

#include "ferry/ops.h"
#include "tests/support/matrix.h"
#include "tests/support/mirrored_ops.h"

namespace ferry::ops {
namespace {

constexpr int kGpu = -1;

struct Implementation {
    const char* name;
    int threads;  // 0: the reference itself; kGpu: the first GPU
};

class OpsContract : public testing::TestWithParam<std::tuple<Implementation, DType>> {
protected:
    void SetUp() override {
        const int threads = std::get<0>(GetParam()).threads;
        std::string why;
        if (threads > 0) team_ = std::make_unique<Team>(threads);
        ops_ = threads == kGpu ? make_mirrored_ops(why)
               : team_         ? make_cpu_ops(*team_)
                               : make_reference_ops();
        if (!ops_) GTEST_SKIP() << why;
    }
    DType type() const { return std::get<1>(GetParam()); }
    Ops& ops() { return *ops_; }
    Ops& oracle() { return *oracle_; }

    void check_gemm(Form form, int64_t m, int64_t n, int64_t k, bool accumulate, bool extras) {
        const bool tn = form == Form::tn, nt = form == Form::nt;
        const DType out = accumulate ? DType::f32 : type();
        const Matrix a = Matrix(type(), tn ? k : m, tn ? m : k).random(1);
        const Matrix b = Matrix(type(), nt ? n : k, nt ? k : n).random(2);
        const Matrix bias = Matrix(type(), 1, n).random(3), addend = Matrix(out, m, n).random(4);
        Matrix actual = Matrix(out, m, n).random(5), expected = actual;
        Gemm g{.form = form,
               .a = a.view(),
               .b = b.view(),
               .c = actual.view(),
               .accumulate = accumulate};
        if (extras) {
            g.bias = bias.view();
            g.addend = addend.view();
        }
        auto scratch = scratch_of(ops().gemm_scratch_bytes(g));
        ops().gemm(g, aligned(scratch));
        g.c = expected.view();
        oracle().gemm(g, nullptr);
        expect_near(actual, expected, std::sqrt(static_cast<double>(k)) * 4);
    }

private:
    std::unique_ptr<Team> team_;
    std::unique_ptr<Ops> ops_, oracle_ = make_reference_ops();
};

TEST_P(OpsContract, gemm_of_every_form_and_odd_size) {
    const int64_t sizes[][3] = {{1, 1, 1},     {3, 5, 7},      {8, 32, 256},
                                {65, 33, 257}, {130, 300, 40}, {270, 97, 520}};
    for (const auto& s : sizes) {
        for (const Form form : {Form::nn, Form::nt, Form::tn}) {
            for (const bool accumulate : {false, true}) {
                SCOPED_TRACE(testing::Message() << s[0] << "x" << s[1] << "x" << s[2] << " form "
                                                << static_cast<int>(form) << accumulate);
                check_gemm(form, s[0], s[1], s[2], accumulate, accumulate != (form == Form::nn));
            }
        }
    }
}

// As a model asks for them: rows without gaps, larger sizes, an output of the compute type or fp32.
TEST_P(OpsContract, gemm_of_a_model_s_sizes_and_every_way_of_adding) {
    enum class Adds { nothing, addend, itself, accumulates };
    const int64_t sizes[][3] = {{225, 96, 72}, {100, 301, 96}, {64, 96, 225}};
    const auto check = [&](Form form, const int64_t* s, DType out, Adds adds) {
        const bool tn = form == Form::tn, nt = form == Form::nt;
        const int64_t m = s[0], n = s[1], k = s[2];
        const Matrix a = Matrix(type(), tn ? k : m, tn ? m : k, 0).random(1);
        const Matrix b = Matrix(type(), nt ? n : k, nt ? k : n, 0).random(2);
        const Matrix addend = Matrix(out, m, n, 0).random(4);
        Matrix actual = Matrix(out, m, n, 0).random(5), expected = actual;
        Gemm g{.form = form, .a = a.view(), .b = b.view(), .c = actual.view()};
        g.accumulate = adds == Adds::accumulates;
        if (adds == Adds::addend) g.addend = addend.view();
        if (adds == Adds::itself) g.addend = actual.view();
        auto scratch = scratch_of(ops().gemm_scratch_bytes(g));
        ops().gemm(g, aligned(scratch));
        g.c = expected.view();
        if (adds == Adds::itself) g.addend = expected.view();
        oracle().gemm(g, nullptr);
        expect_near(actual, expected, std::sqrt(static_cast<double>(k)) * 4);
    };
    for (const auto& s : sizes) {
        for (const Form form : {Form::nn, Form::nt, Form::tn}) {
            for (const DType out : {type(), DType::f32}) {
                for (const Adds adds :
                     {Adds::nothing, Adds::addend, Adds::itself, Adds::accumulates}) {
                    if (adds == Adds::accumulates && out != DType::f32) continue;
                    SCOPED_TRACE(testing::Message()
                                 << s[0] << "x" << s[1] << "x" << s[2] << " form "
                                 << static_cast<int>(form) << " out " << name_of(out) << " adds "
                                 << static_cast<int>(adds));
                    check(form, s, out, adds);
                }
            }
        }
    }
}

TEST_P(OpsContract, gemm_adds_to_its_own_output) {
    const Matrix a = Matrix(type(), 20, 30).random(1), b = Matrix(type(), 30, 50).random(2);
    Matrix actual = Matrix(type(), 20, 50).random(3), expected = actual;
    ops().gemm({.form = Form::nn,
                .a = a.view(),
                .b = b.view(),
                .c = actual.view(),
                .addend = actual.view()},
               nullptr);
    oracle().gemm({.form = Form::nn,
                   .a = a.view(),
                   .b = b.view(),
                   .c = expected.view(),
                   .addend = expected.view()},
                  nullptr);
    expect_near(actual, expected, 20);
}

TEST_P(OpsContract, gemm_without_depth_gives_zero) {
    Matrix c = Matrix(type(), 5, 6).random(3), zero = Matrix(type(), 5, 6).fill(0);
    ops().gemm({.form = Form::nn,
                .a = ConstView(nullptr, type(), 5, 0, 0),
                .b = ConstView(nullptr, type(), 0, 6, 6),
                .c = c.view()},
               nullptr);
    EXPECT_TRUE(c.same_bytes(zero));
}

TEST_P(OpsContract, norm_forward_and_backward) {
    for (const auto& [tokens, hidden] : {std::pair{1, 1}, {3, 17}, {130, 96}, {70, 1030}}) {
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

// As the norm of each head's queries, in place on the way back.
TEST_P(OpsContract, norm_of_every_head) {
    for (const auto& [tokens, heads, n] : {std::array{3, 2, 5}, {50, 3, 48}, {9, 1, 64}}) {
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

TEST_P(OpsContract, layer_norm_forward_and_backward) {
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
        auto scratch = scratch_of(ops().norm_backward_scratch_bytes(tokens, hidden));
        ops().layer_norm_backward(dy.view(), x.view(), w.view(), s.data(), dx.view(), dx.view(),
                                  static_cast<float*>(dw.view().data), aligned(scratch));
        oracle().layer_norm_backward(dy.view(), x.view(), w.view(), s0.data(), dx0.view(),
                                     dx0.view(), static_cast<float*>(dw0.view().data), nullptr);
        expect_near(dx, dx0, 40);
        expect_near(dw, dw0, 40);
        Matrix only(type(), tokens, hidden), only0 = only;
        ops().layer_norm_backward(dy.view(), x.view(), w.view(), s.data(), {}, only.view(), nullptr,
                                  nullptr);
        oracle().layer_norm_backward(dy.view(), x.view(), w.view(), s0.data(), {}, only0.view(),
                                     nullptr, nullptr);
        expect_near(only, only0, 40);
    }
}

TEST_P(OpsContract, rows_are_summed_onto_what_is_there) {
    for (const auto& [rows, cols] : {std::pair{1, 1}, {63, 5}, {64, 33}, {200, 1030}}) {
        const Matrix x = Matrix(type(), rows, cols).random(1);
        Matrix sums = Matrix(DType::f32, 1, cols).random(2), sums0 = sums;
        auto scratch = scratch_of(ops().norm_backward_scratch_bytes(rows, cols));
        ops().sum_rows(x.view(), static_cast<float*>(sums.view().data), aligned(scratch));
        oracle().sum_rows(x.view(), static_cast<float*>(sums0.view().data), nullptr);
        expect_near(sums, sums0, 10);
    }
}

// theta^(-2 i / head_dim)
std::vector<double> frequencies_of(int64_t head_dim) {
    std::vector<double> f;
    for (int64_t i = 0; i < head_dim / 2; ++i)
        f.push_back(std::pow(1e4, -2.0 * static_cast<double>(i) / static_cast<double>(head_dim)));
    return f;
}

TEST_P(OpsContract, rope_turns_and_turns_back) {
    for (const int64_t head_dim : {2, 6, 64}) {
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

struct AttentionCase {
    Attention shape;
    int64_t tokens() const { return shape.sequences * shape.sequence; }
    int64_t query() const { return shape.heads * shape.head_dim; }
    int64_t key() const { return shape.kv_heads * shape.head_dim; }
};

std::vector<AttentionCase> attention_cases() {
    const auto of = [](int64_t n, int64_t s, int64_t h, int64_t kv, int64_t d, int64_t window = 0) {
        const double scale = 1 / std::sqrt(static_cast<double>(d));
        return AttentionCase{{n, s, h, kv, d, scale, DType::f32, window}};
    };
    return {of(1, 1, 1, 1, 2), of(2, 7, 4, 2, 6), of(2, 64, 2, 2, 32), of(1, 130, 6, 2, 40),
            of(1, 193, 2, 1, 16), of(1, 70, 3, 1, 64), of(1, 90, 2, 1, 128),
            // A window of one key, one within a tile, one across tiles, one as long as the text.
            of(2, 70, 2, 1, 8, 1), of(1, 200, 2, 2, 16, 5), of(2, 193, 2, 1, 40, 65),
            of(1, 300, 1, 1, 64, 100), of(1, 130, 2, 1, 16, 130)};
}

TEST_P(OpsContract, attention_forward_and_backward) {
    for (AttentionCase c : attention_cases()) {
        c.shape.type = type();
        SCOPED_TRACE(c.shape.sequence);
        const Matrix q = Matrix(type(), c.tokens(), c.query()).random(1, 2);
        const Matrix k = Matrix(type(), c.tokens(), c.key()).random(2, 2);
        const Matrix v = Matrix(type(), c.tokens(), c.key()).random(3);
        const Matrix dout = Matrix(type(), c.tokens(), c.query()).random(4);
        Matrix out(type(), c.tokens(), c.query()), out0 = out;
        std::vector<float> lse(static_cast<size_t>(c.shape.heads * c.tokens())), lse0 = lse;
        auto room = scratch_of(std::max(ops().attention_forward_scratch_bytes(c.shape),
                                        ops().attention_backward_scratch_bytes(c.shape)));
        ops().attention_forward(c.shape, q.view(), k.view(), v.view(), out.view(), lse.data(),
                                aligned(room));
        oracle().attention_forward(c.shape, q.view(), k.view(), v.view(), out0.view(), lse0.data(),
                                   nullptr);
        expect_near(out, out0, 8);
        for (size_t i = 0; i < lse.size(); ++i) ASSERT_NEAR(lse[i], lse0[i], 1e-5);
        Matrix dq(type(), c.tokens(), c.query()), dq0 = dq;
        Matrix dk(type(), c.tokens(), c.key()), dk0 = dk, dv = dk, dv0 = dk;
        ops().attention_backward(c.shape, q.view(), k.view(), v.view(), out.view(), dout.view(),
                                 lse.data(), dq.view(), dk.view(), dv.view(), aligned(room));
        oracle().attention_backward(c.shape, q.view(), k.view(), v.view(), out.view(), dout.view(),
                                    lse.data(), dq0.view(), dk0.view(), dv0.view(), nullptr);
        // Narrow types: `out` was rounded, and enters the slope.
        const double scale = type() == DType::f32 ? 40 : 4e4;
        expect_near(dq, dq0, scale);
        expect_near(dk, dk0, scale);
        expect_near(dv, dv0, scale);
    }
}

TEST_P(OpsContract, swiglu_forward_and_backward) {
    for (const int64_t cols : {1, 19, 100}) {
        Matrix gate_up = Matrix(type(), 40, 2 * cols).random(1, 3), gate_up0(type(), 1, 1);
        gate_up.set(0, 0, 100);
        gate_up.set(1, 0, -100);
        gate_up.set(2, 0, -88);
        gate_up0 = gate_up;
        const Matrix dy = Matrix(type(), 40, cols).random(2);
        Matrix y(type(), 40, cols), y0 = y;
        ops().swiglu_forward(gate_up.view(), y.view());
        oracle().swiglu_forward(gate_up0.view(), y0.view());
        expect_near(y, y0, 4);
        ops().swiglu_backward(dy.view(), gate_up.view());
        oracle().swiglu_backward(dy.view(), gate_up0.view());
        expect_near(gate_up, gate_up0, 8);
    }
}

TEST_P(OpsContract, gelu_forward_and_backward) {
    for (const int64_t cols : {1, 19, 100}) {
        Matrix x = Matrix(type(), 40, cols).random(1, 3), x0(type(), 1, 1);
        x.set(0, 0, 100);
        x.set(1, 0, -100);
        x.set(2, 0, -5);
        x0 = x;
        const Matrix dy = Matrix(type(), 40, cols).random(2);
        Matrix y(type(), 40, cols), y0 = y;
        ops().gelu_forward(x.view(), y.view());
        oracle().gelu_forward(x0.view(), y0.view());
        expect_near(y, y0, 4);
        ops().gelu_backward(dy.view(), x.view());
        oracle().gelu_backward(dy.view(), x0.view());
        expect_near(x, x0, 8);
    }
}

TEST_P(OpsContract, positions_are_added_and_their_gradient_summed) {
    const std::vector<int32_t> tokens{4, 0, 4, 4, 2, 6};
    const Matrix table = Matrix(type(), 7, 150, 0).random(1);
    const Matrix positions = Matrix(type(), 3, 150).random(2),
                 dx = Matrix(type(), 6, 150).random(3);
    Matrix x(DType::f32, 6, 150), x0 = x;
    ops().embed(tokens.data(), table.view(), positions.view(), x.view());
    oracle().embed(tokens.data(), table.view(), positions.view(), x0.view());
    EXPECT_TRUE(x.same_bytes(x0));
    Matrix g = Matrix(DType::f32, 3, 150, 0).random(4), g0 = g;
    ops().positions_backward(dx.view(), 3, static_cast<float*>(g.view().data));
    oracle().positions_backward(dx.view(), 3, static_cast<float*>(g0.view().data));
    EXPECT_TRUE(g.same_bytes(g0));
}

TEST_P(OpsContract, embedding_rows_and_their_gradient) {
    const std::vector<int32_t> tokens{4, 0, 4, 4, 2, 6, 0};
    const Matrix table = Matrix(type(), 7, 150, 0).random(1), dx = Matrix(type(), 7, 150).random(2);
    Matrix x(DType::f32, 7, 150), x0 = x;
    ops().embed(tokens.data(), table.view(), {}, x.view());
    oracle().embed(tokens.data(), table.view(), {}, x0.view());
    EXPECT_TRUE(x.same_bytes(x0));
    Matrix g = Matrix(DType::f32, 7, 150, 0).random(3), g0 = g;
    ops().embed_backward(tokens.data(), dx.view(), static_cast<float*>(g.view().data));
    oracle().embed_backward(tokens.data(), dx.view(), static_cast<float*>(g0.view().data));
    EXPECT_TRUE(g.same_bytes(g0));
}

TEST_P(OpsContract, cross_entropy_ignores_masked_rows) {
    for (const int64_t vocab : {1, 5, 37, 1100}) {
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

TEST_P(OpsContract, rounded_gradient_and_leaves_are_the_oracle_s_bits) {
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

TEST_P(OpsContract, add_cast_zero_are_exact) {
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

TEST_P(OpsContract, one_bad_element_is_found) {
    Matrix x = Matrix(type(), 9, 37).random(1);
    uint32_t found = 0;
    ops().check_finite(x.view(), &found);
    EXPECT_EQ(found, 0u);
    for (const float bad : {INFINITY, -INFINITY, NAN}) {
        x.set(8, 36, bad);
        found = 4;
        ops().check_finite(x.view(), &found);
        EXPECT_EQ(found, 5u);
    }
}

TEST_P(OpsContract, nan_is_not_swallowed) {
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

std::string name_of_case(const testing::TestParamInfo<OpsContract::ParamType>& info) {
    return std::string(std::get<0>(info.param).name) + "_" +
           std::string(name_of(std::get<1>(info.param)));
}

INSTANTIATE_TEST_SUITE_P(All, OpsContract,
                         testing::Combine(testing::Values(Implementation{"reference", 0},
                                                          Implementation{"cpu", 1},
                                                          Implementation{"cpu_two_threads", 2},
                                                          Implementation{"cuda", kGpu}),
                                          testing::Values(DType::f32, DType::bf16, DType::f16)),
                         name_of_case);

// ---------------------------------------------------------------- the same bits

// A pass over every operation with sums in it; its outputs for one alignment.
std::vector<Matrix> all_sums(Ops* ops, int64_t shift, DType type) {
    const auto in = [&](int64_t r, int64_t c, uint32_t seed) {
        return Matrix(type, r, c, 3, shift).random(seed);
    };
    std::vector<Matrix> outs;
    const Matrix a = in(700, 270, 1), b = in(700, 400, 2);
    outs.push_back(Matrix(DType::f32, 270, 400, 1, shift).random(3));
    ops->gemm({.form = Form::tn,
               .a = a.view(),
               .b = b.view(),
               .c = outs.back().view(),
               .accumulate = true},
              nullptr);
    const Attention shape{2, 150, 4, 2, 24, 0.2, type};
    const Matrix q = in(300, 96, 4), k = in(300, 48, 5), v = in(300, 48, 6), dout = in(300, 96, 7);
    std::vector<float> lse(1200);
    auto room = scratch_of(ops->attention_backward_scratch_bytes(shape));
    for (const int64_t cols : {96, 96, 48, 48}) outs.emplace_back(type, 300, cols, 1, shift);
    ops->attention_forward(shape, q.view(), k.view(), v.view(), outs[1].view(), lse.data(),
                           aligned(room));
    ops->attention_backward(shape, q.view(), k.view(), v.view(), outs[1].view(), dout.view(),
                            lse.data(), outs[2].view(), outs[3].view(), outs[4].view(),
                            aligned(room));
    std::vector<float> rstd(300);
    const Matrix w = in(1, 96, 8);
    outs.emplace_back(type, 300, 96, 1, shift);
    outs.push_back(Matrix(DType::f32, 1, 96, 1, shift).fill(0));
    ops->norm_forward(q.view(), w.view(), 1e-5, outs[5].view(), rstd.data());
    ops->norm_backward(dout.view(), q.view(), w.view(), rstd.data(), {}, outs[5].view(),
                       static_cast<float*>(outs[6].view().data), aligned(room));
    std::vector<float> stats(600);
    outs.emplace_back(type, 300, 96, 1, shift);
    for (int i = 0; i < 2; ++i) outs.emplace_back(DType::f32, 1, 96, 1, shift);
    ops->layer_norm_forward(q.view(), w.view(), w.view(), 1e-5, outs[7].view(), stats.data());
    ops->layer_norm_backward(dout.view(), q.view(), w.view(), stats.data(), {}, outs[7].view(),
                             static_cast<float*>(outs[8].fill(0).view().data), aligned(room));
    ops->sum_rows(dout.view(), static_cast<float*>(outs[9].fill(0).view().data), aligned(room));
    return outs;
}

void expect_same(const std::vector<Matrix>& one, const std::vector<Matrix>& other) {
    for (size_t i = 0; i < one.size(); ++i) EXPECT_TRUE(one[i].same_values(other[i])) << i;
}

TEST(CpuOps, threads_and_alignment_change_no_bit) {
    for (const DType type : {DType::f32, DType::bf16}) {
        Team alone(1);
        const auto one = all_sums(make_cpu_ops(alone).get(), 0, type);
        for (const auto& [threads, shift] : {std::pair{2, 0}, {2, 0}, {3, 1}, {1, 5}}) {
            SCOPED_TRACE(threads);
            Team team(threads);
            expect_same(one, all_sums(make_cpu_ops(team).get(), shift, type));
        }
    }
}

// Buffers begin at multiples of 16 bytes, so only those count.
TEST(CudaOps, runs_and_alignment_change_no_bit) {
    std::string why;
    const auto ops = make_mirrored_ops(why);
    if (!ops) GTEST_SKIP() << why;
    for (const DType type : {DType::f32, DType::bf16, DType::f16}) {
        const auto one = all_sums(ops.get(), 0, type);
        for (const int64_t shift : {0, 0, 8, 24})
            expect_same(one, all_sums(ops.get(), shift, type));
    }
}

// A BLAS that shares scratch between callers without a lock gives wrong sums now and then.
TEST(CpuOps, many_threads_multiply_at_once) {
    Team team(4), one(1);
    const auto ops = make_cpu_ops(team), alone = make_cpu_ops(one);
    const Matrix a = Matrix(DType::f32, 96, 64).random(1), b = Matrix(DType::f32, 64, 64).random(2);
    Matrix expected(DType::f32, 96, 64);
    const auto multiply = [&](Ops& with, Matrix& c) {
        with.gemm({.form = Form::nt, .a = a.view(), .b = b.view(), .c = c.view()}, nullptr);
    };
    multiply(*alone, expected);
    std::vector<Matrix> products(8, Matrix(DType::f32, 96, 64));
    for (int round = 0; round < 2000; ++round) {
        // Whole products side by side, whatever the tiles are.
        team.parallel(8, [&](int64_t i) { multiply(*alone, products[static_cast<size_t>(i)]); });
        for (const Matrix& product : products) ASSERT_TRUE(product.same_bytes(expected)) << round;
    }
}

}  // namespace
}  // namespace ferry::ops
