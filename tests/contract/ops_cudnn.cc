// cuDNN's attention against the oracle: it rounds probabilities, so the tolerance is that of
// products of narrow numbers; but it gives the same bits every time.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <tuple>

#include "ops/ops.h"
#include "ops/slow_paths.h"
#include "tests/support/attention_operands.h"
#include "tests/support/matrix.h"
#include "tests/support/mirrored_ops.h"

namespace ferry::ops {
namespace {

class CudnnAttention : public testing::TestWithParam<DType> {
protected:
    void SetUp() override {
        const std::string versions = cuda_library_versions(AttentionKernels::best);
        if (versions.find("cuDNN") == std::string::npos) GTEST_SKIP() << "built without cuDNN";
        std::string why;
        ops_ = make_mirrored_ops(why, AttentionKernels::best);
        if (!ops_) GTEST_SKIP() << why;
        own_ = make_mirrored_ops(why);
    }

    Attention shape_of(int64_t sequences, int64_t sequence, int64_t heads, int64_t kv_heads,
                       int64_t head_dim, int64_t window = 0) const {
        const double scale = 1 / std::sqrt(static_cast<double>(head_dim));
        return {sequences, sequence, heads, kv_heads, head_dim, scale, GetParam(), window};
    }

    using Operands = AttentionOperands<0>;

    std::unique_ptr<Ops> ops_, own_;
};

// One unit of the type where a value was rounded, and the noise of rounded probabilities.
TEST_P(CudnnAttention, is_near_the_oracle) {
    const auto oracle = make_reference_ops();
    for (const Attention& s : {shape_of(1, 1, 1, 1, 64), shape_of(2, 130, 4, 2, 64),
                               shape_of(3, 193, 6, 2, 128), shape_of(1, 70, 3, 1, 128),
                               // A window of one key, within a tile, across tiles, the whole text.
                               shape_of(1, 70, 2, 1, 64, 1), shape_of(2, 200, 4, 2, 128, 5),
                               shape_of(1, 333, 2, 1, 64, 100), shape_of(1, 130, 2, 2, 128, 130),
                               // Where it has kernels for them; else ferry's own.
                               shape_of(2, 150, 4, 2, 96), shape_of(1, 150, 2, 1, 80)}) {
        SCOPED_TRACE(testing::Message() << s.sequence << " tokens, window " << s.window);
        Operands here(s), there(s);
        here.run(*ops_);
        there.run(*oracle);
        const double noise = unit_of(GetParam());
        expect_near(here.out, there.out, 1, noise);
        for (size_t i = 0; i < here.lse.size(); ++i) ASSERT_NEAR(here.lse[i], there.lse[i], 1e-3);
        expect_near(here.dqkv, there.dqkv, 8, noise);
    }
}

TEST_P(CudnnAttention, same_bits_every_time_and_wherever_operands_lie) {
    for (const int64_t window : {0, 90}) {
        const Attention s = shape_of(2, 300, 6, 2, 128, window);
        Operands one(s);
        one.run(*ops_);
        for (const int64_t shift : {0, 0, 8, 24}) {
            SCOPED_TRACE(testing::Message() << "window " << window << ", shift " << shift);
            Operands other(s, shift);
            other.run(*ops_);
            EXPECT_TRUE(other.out.same_values(one.out));
            EXPECT_TRUE(other.dqkv.same_values(one.dqkv));
            EXPECT_EQ(other.lse, one.lse);
        }
    }
}

// Its deterministic backward pass takes a few sequences at a time: none knows of its neighbours.
TEST_P(CudnnAttention, a_sequence_is_the_same_alone_and_among_others) {
    const Attention many = shape_of(7, 2048, 24, 8, 128);  // calls of four, and of three
    Attention alone = many;
    alone.sequences = 1;
    Operands all(many);
    all.run(*ops_);
    for (const int64_t i : {0, 3, 6}) {
        Operands one(alone);
        for (int64_t r = 0; r < alone.sequence; ++r) {
            for (int64_t c = 0; c < one.qkv.view().cols; ++c)
                one.qkv.set(r, c, all.qkv.get(i * alone.sequence + r, c));
            for (int64_t c = 0; c < one.query; ++c)
                one.dout.set(r, c, all.dout.get(i * alone.sequence + r, c));
        }
        one.run(*ops_);
        for (int64_t r = 0; r < alone.sequence; ++r) {
            for (int64_t c = 0; c < one.qkv.view().cols; ++c)
                ASSERT_EQ(one.dqkv.get(r, c), all.dqkv.get(i * alone.sequence + r, c));
        }
    }
}

// Slopes of more than 1 GiB: groups of heads are calls of their own, and none knows of the others.
TEST_P(CudnnAttention, a_group_of_heads_is_the_same_alone_and_among_others) {
    for (const Attention& many :
         {shape_of(1, 8192, 10, 10, 64), shape_of(1, 6000, 16, 4, 128),
          shape_of(2, 5000, 24, 3, 64), shape_of(1, 6000, 16, 4, 128, 700)}) {
        SCOPED_TRACE(testing::Message() << many.sequence << " tokens, heads " << many.heads << "/"
                                        << many.kv_heads << ", window " << many.window);
        Operands all(many);
        all.run(*ops_);
        Attention alone = many;
        alone.sequences = alone.kv_heads = 1;
        alone.heads = many.heads / many.kv_heads;
        const int64_t d = many.head_dim, width = alone.heads * d;
        const int64_t head = many.kv_heads - 1;  // the last of the last sequence
        const int64_t row = (many.sequences - 1) * many.sequence;
        const auto part = [&](Operands& of, Matrix Operands::*matrix, int i, bool whole) {
            const View view = (i < 0 ? (of.*matrix).view() : of.part(of.*matrix, i));
            const int64_t cols = i == 1 || i == 2 ? d : width;
            return whole ? view.block(row, many.sequence, head * cols, cols) : view;
        };
        Operands one(alone);
        const auto copy = [&](Matrix Operands::*matrix, int i) {
            const View from = part(all, matrix, i, true), to = part(one, matrix, i, false);
            for (int64_t r = 0; r < from.rows; ++r)
                std::memcpy(to.row_range(r, 1).data, from.row_range(r, 1).data,
                            static_cast<size_t>(from.cols * size_of(from.type)));
        };
        for (const int i : {0, 1, 2}) copy(&Operands::qkv, i);
        copy(&Operands::dout, -1);
        one.run(*ops_);
        for (const int i : {0, 1, 2}) {
            const View there = part(all, &Operands::dqkv, i, true);
            const View here = part(one, &Operands::dqkv, i, false);
            for (int64_t r = 0; r < here.rows; ++r)
                ASSERT_EQ(std::memcmp(here.row_range(r, 1).data, there.row_range(r, 1).data,
                                      static_cast<size_t>(here.cols * size_of(here.type))),
                          0)
                    << "operand " << i << ", row " << r;
        }
    }
}

// Windows keep the oracle's work small; ferry's own attention, which is held to the oracle for
// itself, stands for it where a query sees all before it. Of those but the last all but that of
// 6,000 tokens go back by lists of blocks on Hopper, where that is faster. The last has more slopes
// than a call may keep of one head of keys: it goes by tiles, as many as a real run has.
TEST_P(CudnnAttention, long_sequences_are_near_the_oracle) {
    const auto oracle = make_reference_ops();
    for (const Attention& s :
         {shape_of(1, 8192, 10, 10, 64, 24), shape_of(1, 5000, 24, 3, 64, 33),
          shape_of(1, 6000, 16, 4, 128, 17), shape_of(1, 8192, 10, 10, 64),
          shape_of(1, 5000, 24, 3, 64), shape_of(1, 6000, 16, 4, 128), shape_of(1, 8320, 8, 1, 64),
          shape_of(1, 12001, 8, 2, 128), shape_of(1, 16500, 8, 1, 128)}) {
        SCOPED_TRACE(testing::Message() << s.sequence << " tokens, heads " << s.heads << "/"
                                        << s.kv_heads << ", window " << s.window);
        Operands here(s), there(s), again(s);
        here.run(*ops_);
        again.run(*ops_);
        EXPECT_TRUE(again.dqkv.same_values(here.dqkv));
        there.run(s.window > 0 ? *oracle : *own_);
        const double noise = unit_of(GetParam());
        expect_near(here.out, there.out, 1, noise);
        // A key that thousands of queries of several heads see adds up as many rounded
        // probabilities: single elements drift, the whole does not.
        expect_near(here.dqkv, there.dqkv, s.window > 0 ? 8 : 32, noise);
        EXPECT_LT(distance(here.dqkv, there.dqkv), 1.5 * noise);
    }
}

// So few slopes a call that short sequences go by tiles: squares, or strips where there is a
// window. Lengths that are no multiple of a tile, groups of one, three and four heads, several
// sequences.
class CudnnTiles : public CudnnAttention {
protected:
    void SetUp() override {
        CudnnAttention::SetUp();
        std::string why;
        if (ops_) tiled_ = make_mirrored_ops(why, AttentionKernels::best, 256 * kKiB);
    }
    std::vector<Attention> shapes() const {
        return {shape_of(1, 768, 2, 2, 64),      shape_of(1, 700, 2, 2, 128),
                shape_of(2, 641, 6, 2, 128),     shape_of(1, 515, 4, 1, 64),
                shape_of(2, 900, 8, 2, 128),     shape_of(1, 385, 3, 1, 96),
                shape_of(1, 700, 4, 1, 64, 1),   shape_of(2, 700, 4, 1, 128, 90),
                shape_of(1, 641, 3, 3, 64, 129), shape_of(1, 768, 8, 2, 128, 256),
                shape_of(1, 900, 6, 2, 128, 500)};
    }
    static std::string text(const Attention& s) {
        return std::to_string(s.sequences) + " x " + std::to_string(s.sequence) + ", heads " +
               std::to_string(s.heads) + "/" + std::to_string(s.kv_heads) + " x " +
               std::to_string(s.head_dim) + ", window " + std::to_string(s.window);
    }

    std::unique_ptr<Ops> tiled_;
};

TEST_P(CudnnTiles, are_near_the_oracle_and_the_same_every_time) {
    const auto oracle = make_reference_ops();
    for (const Attention& s : shapes()) {
        SCOPED_TRACE(text(s));
        Operands here(s), again(s, 8), there(s);
        here.run(*tiled_);
        again.run(*tiled_);
        EXPECT_TRUE(again.dqkv.same_values(here.dqkv));
        there.run(*oracle);
        const double noise = unit_of(GetParam());
        expect_near(here.dqkv, there.dqkv, 8, noise);
        EXPECT_LT(distance(here.dqkv, there.dqkv), 1.5 * noise);
    }
}

// Nor does a sequence or a group of heads know of its neighbours there.
TEST_P(CudnnTiles, a_sequence_is_the_same_alone_and_among_others) {
    for (const Attention& many : {shape_of(3, 641, 8, 2, 128), shape_of(3, 641, 8, 2, 128, 200)}) {
        SCOPED_TRACE(text(many));
        Attention alone = many;
        alone.sequences = 1;
        Operands all(many), one(alone);
        all.run(*tiled_);
        const int64_t row = 2 * many.sequence;
        const auto rows_of = [&](const View& v) { return v.row_range(row, many.sequence); };
        const auto copy = [](const View& from, const View& to) {
            for (int64_t r = 0; r < to.rows; ++r)
                std::memcpy(to.row_range(r, 1).data, from.row_range(r, 1).data,
                            static_cast<size_t>(to.cols * size_of(to.type)));
        };
        copy(rows_of(all.qkv.view()), one.qkv.view());
        copy(rows_of(all.dout.view()), one.dout.view());
        one.run(*tiled_);
        for (int64_t r = 0; r < alone.sequence; ++r) {
            for (int64_t c = 0; c < one.dqkv.cols(); ++c)
                ASSERT_EQ(one.dqkv.get(r, c), all.dqkv.get(row + r, c)) << r << ", " << c;
        }
    }
}

TEST_P(CudnnTiles, go_the_fast_way) {
    const auto executor = make_thread_executor();
    const auto device = Device::open(DeviceKind::cuda, *executor);
    const auto ops = make_cuda_ops(*device, AttentionKernels::best, 256 * kKiB);
    for (const Attention& s : shapes()) {
        if (s.head_dim == 96) continue;  // not every version has kernels for it
        SCOPED_TRACE(text(s));
        ops->attention_backward_scratch_bytes(s);
        EXPECT_TRUE(slow_paths(*ops).empty());
    }
}

// Where cuDNN has no kernels, the result is ferry's own attention, bit for bit.
TEST_P(CudnnAttention, other_heads_fall_back) {
    const Attention s = shape_of(2, 70, 4, 2, 40);
    Operands here(s), own(s);
    here.run(*ops_);
    own.run(*own_);
    EXPECT_TRUE(here.out.same_values(own.out));
    EXPECT_TRUE(here.dqkv.same_values(own.dqkv));
}

TEST_P(CudnnAttention, what_goes_no_fast_way_is_named) {
    const auto executor = make_thread_executor();
    const auto device = Device::open(DeviceKind::cuda, *executor);
    const auto ops = make_cuda_ops(*device);
    ops->attention_forward_scratch_bytes(shape_of(2, 300, 4, 2, 64));
    ops->attention_backward_scratch_bytes(shape_of(2, 300, 4, 2, 64));
    EXPECT_TRUE(slow_paths(*ops).empty());
    for (int i = 0; i < 3; ++i) ops->attention_backward_scratch_bytes(shape_of(2, 300, 4, 2, 40));
    const std::vector<SlowPath> found = slow_paths(*ops);
    ASSERT_EQ(found.size(), 1U);
    EXPECT_EQ(found[0].operation, "attention backward");
    EXPECT_EQ(found[0].shape, "2 x 300, heads 4/2 x 40");
    EXPECT_EQ(found[0].times, 3);
    EXPECT_NE(found[0].why.find("16-bit heads"), std::string::npos) << found[0].why;
    EXPECT_GT(found[0].seconds, found[0].fast_seconds);
}

const auto kTypeName = [](const auto& param) { return std::string(name_of(param.param)); };
INSTANTIATE_TEST_SUITE_P(All, CudnnAttention, testing::Values(DType::bf16, DType::f16), kTypeName);
INSTANTIATE_TEST_SUITE_P(All, CudnnTiles, testing::Values(DType::bf16, DType::f16), kTypeName);

}  // namespace
}  // namespace ferry::ops
