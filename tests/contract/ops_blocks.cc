// The GPU's attention over lists of blocks against the oracle: its own kernels and those that every
// GPU runs. It rounds probabilities, so the tolerance is that of products of narrow numbers; but it
// gives the same bits every time.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "ops/ops.h"
#include "tests/support/attention_operands.h"
#include "tests/support/matrix.h"
#include "tests/support/mirrored_ops.h"

namespace ferry::ops {
namespace {

// A mask and what it is made of.
struct Masked {
    Attention shape;
    BlockLists lists{};
    std::vector<int32_t> starts{}, ends{};

    // Cells by a rule of layout, row and column; the causal mask cuts them.
    template <class Rule>
    Masked& cells(int block, int layouts, const Rule& there) {
        lists.block = block;
        lists.layouts = layouts;
        lists.blocks = static_cast<int>(ceil_div(shape.sequence, int64_t{block}));
        lists.row_starts = {0};
        for (int layout = 0; layout < layouts; ++layout) {
            for (int row = 0; row < lists.blocks; ++row) {
                for (int column = 0; column <= row; ++column)
                    if (there(layout, row, column)) lists.columns.push_back(column);
                lists.row_starts.push_back(static_cast<int32_t>(lists.columns.size()));
            }
        }
        lists.transpose();
        return *this;
    }
    // Of `tokens` each, the first of sequence i shorter by i.
    Masked& documents(int64_t tokens) {
        for (int64_t i = 0; i < shape.sequences; ++i) {
            for (int64_t t = 0; t < shape.sequence; ++t) {
                const int64_t begin = (t + i) / tokens * tokens - i;
                starts.push_back(static_cast<int32_t>(std::max<int64_t>(begin, 0)));
                ends.push_back(static_cast<int32_t>(std::min(begin + tokens, shape.sequence)));
            }
        }
        return *this;
    }
    Attention attention() const {
        Attention s = shape;
        if (lists.blocks > 0) {
            s.pattern = &lists;
            s.blocks = lists.view();
        }
        s.documents = !starts.empty();
        s.document_start = s.documents ? starts.data() : nullptr;
        s.document_end = s.documents ? ends.data() : nullptr;
        return s;
    }
};

bool some(int layout, int row, int column) {
    return row == column || (row * 7 + column * 5 + layout * 3) % 4 < 2;
}
bool window_and_global(int, int row, int column) { return row - column < 2 || column == 0; }
// Blocks without their diagonal, and rows without any block.
bool holes(int layout, int row, int column) {
    return (row + layout) % 3 != 1 && (row + column + layout) % 2 == 1;
}

class CudaBlocks : public testing::TestWithParam<DType> {
protected:
    void SetUp() override {
        std::string why;
        for (const bool any_gpu : {false, true}) {
            auto made = make_mirrored_ops(why, AttentionKernels::best, kMostSlopeBytes, any_gpu);
            if (!made) GTEST_SKIP() << why;
            ops_.push_back(std::move(made));
        }
        try {
            const Masked one = of(1, 64, 1, 1, 64).documents(64);
            ops_[0]->attention_forward_scratch_bytes(one.attention());
        } catch (const Error& error) {
            GTEST_SKIP() << error.what();
        }
    }

    static DType type() { return GetParam(); }
    static Masked of(int64_t sequences, int64_t sequence, int64_t heads, int64_t kv_heads,
                     int64_t head_dim, int64_t window = 0) {
        const double scale = 1 / std::sqrt(static_cast<double>(head_dim));
        return {{sequences, sequence, heads, kv_heads, head_dim, scale, type(), window}};
    }

    using Operands = AttentionOperands<8>;

    void expect_near_oracle(const Masked& masked) {
        const Attention s = masked.attention();
        SCOPED_TRACE(testing::Message()
                     << s.sequences << " x " << s.sequence << ", heads " << s.heads << "/"
                     << s.kv_heads << " x " << s.head_dim << ", window " << s.window << ", blocks "
                     << masked.lists.block << " of " << masked.lists.layouts
                     << " layouts, documents " << s.documents);
        const auto oracle = make_reference_ops();
        Operands there(s);
        there.run(*oracle);
        for (const auto& ops : ops_) {
            SCOPED_TRACE(ops == ops_[0] ? "this GPU's kernels" : "any GPU's kernels");
            Operands here(s), again(s, 8);
            here.run(*ops);
            again.run(*ops);
            EXPECT_TRUE(again.out.same_values(here.out));
            EXPECT_TRUE(again.dqkv.same_values(here.dqkv));
            EXPECT_EQ(again.lse, here.lse);
            expect_near(here, there);
        }
    }
    void expect_near(const Operands& here, const Operands& there) {
        const double noise = unit_of(type());
        ops::expect_near(here.out, there.out, 1, noise);
        ops::expect_near(here.dqkv, there.dqkv, 8, noise);
        EXPECT_LT(distance(here.out, there.out), 1.5 * noise);
        EXPECT_LT(distance(here.dqkv, there.dqkv), 1.5 * noise);
        for (size_t i = 0; i < here.lse.size(); ++i) {
            if (std::isinf(there.lse[i])) {
                ASSERT_EQ(here.lse[i], there.lse[i]);
            } else {
                ASSERT_NEAR(here.lse[i], there.lse[i], 1e-3);
            }
        }
    }

    std::vector<std::unique_ptr<Ops>> ops_;  // this GPU's, and those that every GPU runs
};

TEST_P(CudaBlocks, every_width_and_block_is_near_the_oracle) {
    for (const int64_t head_dim : {64, 96, 128, 256, 40}) {
        for (const int block : {64, 128}) {
            expect_near_oracle(of(2, 290, 2, 1, head_dim).cells(block, 1, some));
            expect_near_oracle(of(1, 333, 2, 2, head_dim).cells(block, 2, some).documents(130));
        }
    }
}

TEST_P(CudaBlocks, every_mask_is_near_the_oracle) {
    expect_near_oracle(of(1, 700, 4, 1, 64).cells(64, 1, window_and_global));
    expect_near_oracle(of(1, 500, 4, 2, 128).cells(128, 4, some));
    expect_near_oracle(of(2, 400, 4, 2, 128, 200).cells(64, 4, some).documents(150));
    expect_near_oracle(of(1, 400, 2, 2, 128, 1).cells(128, 1, some));
    for (const int64_t tokens : {1, 63, 64, 65, 200, 300})
        expect_near_oracle(of(2, 300, 2, 1, 64).documents(tokens));
    for (const int64_t sequence : {1, 63, 64, 65, 127, 129})
        expect_near_oracle(of(3, sequence, 4, 2, 64).documents(50));
    expect_near_oracle(of(1, 500, 3, 1, 96, 90).documents(256));
}

TEST_P(CudaBlocks, rows_that_see_nothing_are_zero) {
    for (const int block : {64, 128})
        expect_near_oracle(of(1, 500, 2, 1, 64).cells(block, 2, holes).documents(300));
    const Masked nothing = of(1, 200, 1, 1, 128).cells(64, 1, [](int, int, int) { return false; });
    const Attention s = nothing.attention();
    for (const auto& ops : ops_) {
        Operands o(s);
        o.run(*ops);
        for (const float lse : o.lse) EXPECT_EQ(lse, -std::numeric_limits<float>::infinity());
        for (int64_t r = 0; r < o.out.rows(); ++r) {
            for (int64_t c = 0; c < o.out.cols(); ++c) ASSERT_EQ(o.out.get(r, c), 0);
            for (int64_t c = 0; c < o.dqkv.cols(); ++c) ASSERT_EQ(o.dqkv.get(r, c), 0);
        }
    }
}

// Heads that the dense kernels are too narrow for.
TEST_P(CudaBlocks, wide_heads_without_a_mask) {
    expect_near_oracle(of(2, 300, 4, 2, 256));
    expect_near_oracle(of(1, 300, 2, 1, 192, 77));
}

TEST_P(CudaBlocks, a_sequence_is_the_same_alone_and_among_others) {
    const Masked many = of(3, 500, 4, 2, 128).cells(128, 4, some);
    const Attention all = many.attention();
    Attention alone = all;
    alone.sequences = 1;
    Operands together(all), one(alone);
    together.run(*ops_[0]);
    const int64_t row = 2 * all.sequence;
    for (int64_t r = 0; r < all.sequence; ++r) {
        for (int64_t c = 0; c < one.qkv.cols(); ++c)
            one.qkv.set(r, c, together.qkv.get(row + r, c));
        for (int64_t c = 0; c < one.dout.cols(); ++c)
            one.dout.set(r, c, together.dout.get(row + r, c));
    }
    one.run(*ops_[0]);
    for (int64_t r = 0; r < all.sequence; ++r) {
        for (int64_t c = 0; c < one.out.cols(); ++c)
            ASSERT_EQ(one.out.get(r, c), together.out.get(row + r, c));
        for (int64_t c = 0; c < one.dqkv.cols(); ++c)
            ASSERT_EQ(one.dqkv.get(r, c), together.dqkv.get(row + r, c));
    }
}

// As many tiles as a real run has: a pattern of all blocks beside ferry's dense attention.
TEST_P(CudaBlocks, long_sequences_are_near_dense_attention) {
    std::string why;
    const auto dense = make_mirrored_ops(why);
    for (Masked masked : {of(1, 8192, 4, 1, 128), of(2, 5001, 4, 2, 64)}) {
        Operands there(masked.shape);
        there.run(*dense);
        for (const int block : {64, 128}) {
            masked.lists = {};
            const Attention s =
                masked.cells(block, 1, [](int, int, int) { return true; }).attention();
            for (const auto& ops : ops_) {
                Operands here(s), again(s);
                here.run(*ops);
                again.run(*ops);
                EXPECT_TRUE(again.dqkv.same_values(here.dqkv));
                EXPECT_LT(distance(here.out, there.out), 1.5 * unit_of(type()));
                EXPECT_LT(distance(here.dqkv, there.dqkv), 1.5 * unit_of(type()));
            }
        }
    }
}

TEST_P(CudaBlocks, scratch_grows_with_the_sequence) {
    const auto bytes = [&](int64_t sequence) {
        const Masked masked = of(1, sequence, 4, 2, 128).documents(sequence);
        return ops_[0]->attention_backward_scratch_bytes(masked.attention());
    };
    EXPECT_LT(bytes(64 << 10), 4.1 * static_cast<double>(bytes(16 << 10)));
}

TEST_P(CudaBlocks, what_it_does_not_do_is_named) {
    Masked wide = of(1, 100, 1, 1, 264).documents(50);
    EXPECT_THROW(ops_[0]->attention_forward_scratch_bytes(wide.attention()), Error);
    Masked narrow = of(1, 100, 1, 1, 64).documents(50);
    narrow.shape.type = DType::f32;
    EXPECT_THROW(ops_[0]->attention_forward_scratch_bytes(narrow.attention()), Error);
    EXPECT_THROW(ops_[0]->attention_backward_scratch_bytes(narrow.attention()), Error);
}

INSTANTIATE_TEST_SUITE_P(All, CudaBlocks, testing::Values(DType::bf16, DType::f16),
                         [](const auto& param) { return std::string(name_of(param.param)); });

}  // namespace
}  // namespace ferry::ops
