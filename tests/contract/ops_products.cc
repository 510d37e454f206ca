// Products and attention of every implementation of Ops against the oracle, on odd sizes, for every
// type; and everything that sums, bit for bit between one and two threads and between alignments.
#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <limits>
#include <vector>

#include "ops/product_table.h"
#include "tests/contract/ops_fixture.h"
#include "tests/support/quick.h"

namespace ferry::ops {
namespace {

class OpsProducts : public OpsContract {
protected:
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

    // What a product is added to: nothing, a tensor of its own, `c` as the addend, or `c` in place.
    enum class Adds { nothing, addend, itself, accumulates };
    // The product `gemm`, of depth k, into `actual` beside the oracle's into the same elements.
    void check_added(Gemm gemm, Adds adds, const Matrix& addend, Matrix& actual, int64_t k) {
        Matrix expected = actual;
        gemm.accumulate = adds == Adds::accumulates;
        if (adds == Adds::addend) gemm.addend = addend.view();
        if (adds == Adds::itself) gemm.addend = actual.view();
        auto scratch = scratch_of(ops().gemm_scratch_bytes(gemm));
        ops().gemm(gemm, aligned(scratch));
        gemm.c = expected.view();
        if (adds == Adds::itself) gemm.addend = expected.view();
        oracle().gemm(gemm, nullptr);
        expect_near(actual, expected, std::sqrt(static_cast<double>(k)) * 4);
    }
};

TEST_P(OpsProducts, gemm_of_every_form_and_odd_size) {
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

// As a model asks for them: rows without gaps, larger sizes, an output of the compute type or fp32,
// a bias wherever the tensor before it ends.
TEST_P(OpsProducts, gemm_of_a_model_s_sizes_and_every_way_of_adding) {
    const int64_t sizes[][3] = {{225, 96, 72}, {100, 301, 96}, {64, 96, 225}};
    enum class Bias { none, aligned, odd, in_depth };
    const auto check = [&](Form form, const int64_t* s, DType out, Adds adds, Bias biased) {
        const bool tn = form == Form::tn, nt = form == Form::nt;
        const int64_t m = s[0], n = s[1], k = s[2];
        const int64_t spare = biased == Bias::in_depth ? kSpare : 0;
        const Matrix a = Matrix(type(), tn ? k : m, tn ? m : k, spare).random(1);
        const Matrix b = Matrix(type(), nt ? n : k, nt ? k : n, 0).random(2);
        const Matrix addend = Matrix(out, m, n, 0).random(4);
        const Matrix bias = Matrix(type(), 1, n, 0, biased == Bias::odd ? 1 : 0).random(3);
        Matrix actual = Matrix(out, m, n, 0).random(5);
        Gemm g{.form = form, .a = a.view(), .b = b.view(), .c = actual.view()};
        if (biased != Bias::none) g.bias = bias.view();
        g.spare = spare;
        check_added(g, adds, addend, actual, k);
    };
    Spread spread(5);
    for (const auto& s : sizes) {
        for (const Form form : {Form::nn, Form::nt, Form::tn}) {
            for (const DType out : {type(), DType::f32}) {
                for (const Adds adds :
                     {Adds::nothing, Adds::addend, Adds::itself, Adds::accumulates}) {
                    if (adds == Adds::accumulates && out != DType::f32) continue;
                    for (const Bias biased :
                         {Bias::none, Bias::aligned, Bias::odd, Bias::in_depth}) {
                        if (!spread.takes()) continue;
                        SCOPED_TRACE(testing::Message()
                                     << s[0] << "x" << s[1] << "x" << s[2] << " form "
                                     << static_cast<int>(form) << " out " << name_of(out)
                                     << " adds " << static_cast<int>(adds) << " bias "
                                     << static_cast<int>(biased));
                        check(form, s, out, adds, biased);
                    }
                }
            }
        }
    }
}

// What lies there is not read, and the bits are those of a sum with zeros: of an odd number of
// rows, columns or steps too, which a GPU multiplies apart.
TEST_P(OpsProducts, a_fresh_sum_counts_as_zeros) {
    const int64_t sizes[][3] = {{3, 5, 7}, {64, 96, 225}, {301, 96, 100}, {96, 301, 64}, {8, 8, 0}};
    for (const auto& s : sizes) {
        for (const Form form : {Form::nn, Form::nt, Form::tn}) {
            SCOPED_TRACE(testing::Message() << s[0] << "x" << s[1] << "x" << s[2] << " form "
                                            << static_cast<int>(form));
            const bool tn = form == Form::tn, nt = form == Form::nt;
            const Matrix a = Matrix(type(), tn ? s[2] : s[0], tn ? s[0] : s[2], 0).random(1);
            const Matrix b = Matrix(type(), nt ? s[1] : s[2], nt ? s[2] : s[1], 0).random(2);
            Matrix added = Matrix(DType::f32, s[0], s[1], 0).fill(0), written = added;
            written.fill(std::numeric_limits<float>::quiet_NaN());
            Gemm g{
                .form = form, .a = a.view(), .b = b.view(), .c = added.view(), .accumulate = true};
            auto scratch = scratch_of(ops().gemm_scratch_bytes(g));
            ops().gemm(g, aligned(scratch));
            g.c = written.view();
            g.fresh = true;
            ops().gemm(g, aligned(scratch));
            EXPECT_TRUE(written.same_bytes(added));
        }
    }
}

// Sums of whole numbers and sixteenths are exact in fp32, in any order and split in any way. So one
// rounding, and no two, gives the oracle's bits.
TEST_P(OpsProducts, gemm_rounds_once) {
    const int64_t m = 384, n = 320, k = 128;
    const auto grid = [](Matrix matrix, uint32_t seed, int64_t steps, float unit) {
        uint64_t state = seed;
        for (int64_t r = 0; r < matrix.rows(); ++r) {
            for (int64_t c = 0; c < matrix.cols(); ++c) {
                state = state * 6364136223846793005U + 1442695040888963407U;
                const auto step = static_cast<int64_t>((state >> 33) % (2 * steps + 1)) - steps;
                matrix.set(r, c, static_cast<float>(step) * unit);
            }
        }
        return matrix;
    };
    const auto check = [&](Form form, Adds adds, bool biased, int64_t spare) {
        const bool tn = form == Form::tn, nt = form == Form::nt;
        const Matrix a = grid(Matrix(type(), tn ? k : m, tn ? m : k, spare), 1, 40, 1);
        const Matrix b = grid(Matrix(type(), nt ? n : k, nt ? k : n, 0), 2, 40, 1);
        const Matrix bias = grid(Matrix(type(), 1, n, 0), 3, 100, 1.0F / 16);
        const Matrix addend = grid(Matrix(type(), m, n, 0), 4, 100, 1.0F / 16);
        Matrix actual = grid(Matrix(type(), m, n, 0), 5, 100, 1.0F / 16), expected = actual;
        Gemm g{.form = form, .a = a.view(), .b = b.view(), .c = actual.view(), .spare = spare};
        if (biased) g.bias = bias.view();
        if (adds == Adds::addend) g.addend = addend.view();
        if (adds == Adds::itself) g.addend = actual.view();
        auto scratch = scratch_of(ops().gemm_scratch_bytes(g));
        ops().gemm(g, aligned(scratch));
        g.c = expected.view();
        if (adds == Adds::itself) g.addend = expected.view();
        oracle().gemm(g, nullptr);
        EXPECT_TRUE(actual.same_values(expected));
    };
    Spread spread(5);
    for (const Form form : {Form::nn, Form::nt, Form::tn}) {
        for (const Adds adds : {Adds::nothing, Adds::addend, Adds::itself}) {
            for (const bool biased : {false, true}) {
                for (const int64_t spare : {int64_t{0}, kSpare}) {
                    if (!spread.takes()) continue;
                    SCOPED_TRACE(testing::Message() << "form " << static_cast<int>(form) << " adds "
                                                    << static_cast<int>(adds) << " bias " << biased
                                                    << " spare " << spare);
                    check(form, adds, biased, spare);
                }
            }
        }
    }
}

// The head of a model with an odd vocabulary: rows of logits begin at multiples of 64 elements, and
// a GPU does what is behind the last multiple of 8 by itself.
TEST_P(OpsProducts, gemm_of_an_odd_vocabulary) {
    const int64_t tokens = 136, hidden = 72;
    const auto check = [&](Form form, int64_t vocab, DType out, Adds adds) {
        const int64_t gap = round_up(vocab, 64) - vocab;
        const bool tn = form == Form::tn, nt = form == Form::nt;
        const int64_t m = tn ? vocab : tokens, n = nt ? vocab : hidden;
        const int64_t k = tn ? tokens : nt ? hidden : vocab, c_gap = nt ? gap : 0;
        const Matrix a = Matrix(type(), tn ? k : m, tn ? m : k, nt ? 0 : gap).random(1);
        const Matrix b = Matrix(type(), nt ? n : k, nt ? k : n, 0).random(2);
        const Matrix addend = Matrix(out, m, n, c_gap).random(4);
        Matrix actual = Matrix(out, m, n, c_gap).random(5);
        Gemm g{.form = form, .a = a.view(), .b = b.view(), .c = actual.view()};
        check_added(g, adds, addend, actual, k);
    };
    Spread spread(5);
    for (const int64_t vocab : {257, 263, 300}) {
        for (const Form form : {Form::nn, Form::nt, Form::tn}) {
            for (const DType out : {type(), DType::f32}) {
                for (const Adds adds :
                     {Adds::nothing, Adds::addend, Adds::itself, Adds::accumulates}) {
                    if (adds == Adds::accumulates && out != DType::f32) continue;
                    if (!spread.takes()) continue;
                    SCOPED_TRACE(testing::Message()
                                 << vocab << " form " << static_cast<int>(form) << " out "
                                 << name_of(out) << " adds " << static_cast<int>(adds));
                    check(form, vocab, out, adds);
                }
            }
        }
    }
}

TEST_P(OpsProducts, gemm_adds_to_its_own_output) {
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

TEST_P(OpsProducts, gemm_without_depth_gives_zero) {
    Matrix c = Matrix(type(), 5, 6).random(3), zero = Matrix(type(), 5, 6).fill(0);
    ops().gemm({.form = Form::nn,
                .a = ConstView(nullptr, type(), 5, 0, 0),
                .b = ConstView(nullptr, type(), 0, 6, 6),
                .c = c.view()},
               nullptr);
    EXPECT_TRUE(c.same_bytes(zero));
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

TEST_P(OpsProducts, attention_forward_and_backward) {
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

INSTANTIATE_TEST_SUITE_P(All, OpsProducts, every_implementation_and_type(), name_of_case);

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
                             static_cast<float*>(outs[8].fill(0).view().data), nullptr,
                             aligned(room));
    ops->sum_rows(dout.view(), static_cast<float*>(outs[9].fill(0).view().data), aligned(room));
    outs.push_back(Matrix(type, 270, 400, 1, shift).random(9));
    const Matrix bias = in(1, 400, 10);
    Gemm biased{.form = Form::tn, .a = a.view(), .b = b.view(), .c = outs.back().view()};
    biased.bias = bias.view();
    biased.addend = outs.back().view();
    ops->gemm(biased, nullptr);
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

// What tuning found does the same products in the same way in another process, which is why its
// table is part of the numerics record.
TEST(CudaOps, a_table_of_products_gives_the_bits_that_tuning_gave) {
    std::string why;
    const auto made = [&](const ProductTable* table) {
        return make_mirrored_ops(why, AttentionKernels::ferry, kMostSlopeBytes, false, table);
    };
    const auto tuning = made(nullptr);
    if (!tuning) GTEST_SKIP() << why;
    tuner_of(*tuning)->tune_products();
    const Matrix a = Matrix(DType::bf16, 256, 512, 0).random(1),
                 b = Matrix(DType::bf16, 512, 384, 0).random(2),
                 tall = Matrix(DType::bf16, 512, 256, 0).random(3);
    const auto products = [&](Ops& by) {
        std::vector<Matrix> c;
        c.emplace_back(DType::bf16, 256, 384, 0);
        c.push_back(Matrix(DType::f32, 256, 384, 0).random(4));
        by.gemm({.a = a.view(), .b = b.view(), .c = c[0].view()}, nullptr);
        by.gemm({.form = Form::tn,
                 .a = tall.view(),
                 .b = b.view(),
                 .c = c[1].view(),
                 .accumulate = true},
                nullptr);
        return c;
    };
    products(*tuning);  // adds to c again and again
    const std::vector<Matrix> tuned = products(*tuning);
    const std::vector<Matrix> expected = products(*make_reference_ops());
    expect_near(tuned[0], expected[0], 40);
    expect_near(tuned[1], expected[1], 40);
    const ProductTable table = tuner_of(*tuning)->tuned_products();
    EXPECT_EQ(table.size(), 2);
    const ProductTable read = ProductTable::parse(table.text(), "a table");
    const auto tabled = made(&read);
    ASSERT_TRUE(tabled) << why;
    ASSERT_TRUE(table_of(*tabled));
    EXPECT_EQ(table_of(*tabled)->hash(), table.hash());
    EXPECT_FALSE(table_of(*tuning));
    expect_same(tuned, products(*tabled));
    ProductTable other("cuda sm_90, cuBLASLt 1.0.0");
    EXPECT_FALSE(made(&other));
    EXPECT_NE(why.find("another GPU or library"), std::string::npos) << why;
}

}  // namespace
}  // namespace ferry::ops
