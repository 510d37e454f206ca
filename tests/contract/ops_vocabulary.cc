// Embeddings, positions and the loss, of every implementation of Ops against the oracle, on odd
// sizes, for every type.
#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <utility>
#include <vector>

#include "tests/contract/ops_fixture.h"

namespace ferry::ops {
namespace {

class OpsVocabulary : public OpsContract {};

// Rows of a token among many others, some of them next to each other.
TEST_P(OpsVocabulary, gradient_of_an_embedding_is_summed_in_the_order_of_its_tokens) {
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

TEST_P(OpsVocabulary, positions_are_added_and_their_gradient_summed) {
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

TEST_P(OpsVocabulary, positions_begin_anew_with_each_document) {
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

TEST_P(OpsVocabulary, embedding_rows_and_their_gradient) {
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

TEST_P(OpsVocabulary, cross_entropy_ignores_masked_rows) {
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
TEST_P(OpsVocabulary, embedding_rows_of_several_ranks_are_those_of_one) {
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
TEST_P(OpsVocabulary, cross_entropy_of_parts_is_that_of_the_whole) {
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
TEST_P(OpsVocabulary, cross_entropy_of_many_rows_is_that_of_each) {
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

INSTANTIATE_TEST_SUITE_P(All, OpsVocabulary, every_implementation_and_type(), name_of_case);

}  // namespace
}  // namespace ferry::ops
