// Operations with a watch around them: the same results, and what each call was.
#include <gtest/gtest.h>

#include "ops/timed_ops.h"
#include "tests/support/matrix.h"

namespace ferry::ops {
namespace {

class TimedOperations : public testing::Test {
protected:
    Team team_{1};
    std::unique_ptr<Executor> executor_ = make_thread_executor();
    std::unique_ptr<Device> device_ = Device::open(DeviceKind::cpu, *executor_);
    std::unique_ptr<Ops> ops_ = make_cpu_ops(team_);
    TimedOps timed_{*ops_, *device_};
};

TEST_F(TimedOperations, a_product_is_noted_with_its_shape_and_gives_the_same_bits) {
    Matrix a(DType::bf16, 6, 40), b(DType::bf16, 10, 40), c(DType::f32, 6, 10), d(c);
    a.random(1);
    b.random(2);
    const Gemm gemm{.form = Form::nt, .a = a.view(), .b = b.view(), .c = c.view()};
    auto room = scratch_of(ops_->gemm_scratch_bytes(gemm));
    EXPECT_EQ(timed_.ops().gemm_scratch_bytes(gemm), ops_->gemm_scratch_bytes(gemm));
    timed_.begin(TimedOps::Mode::time);
    timed_.ops().gemm(gemm, aligned(room));
    const std::vector<OpCall> calls = timed_.take();
    ASSERT_EQ(calls.size(), 1U);
    EXPECT_EQ(calls[0].name, "product nt");
    EXPECT_EQ(calls[0].shape, "6 x 10 x 40, bf16");
    EXPECT_EQ(calls[0].flops, 2.0 * 6 * 10 * 40);
    EXPECT_EQ(calls[0].bytes, 2.0 * (6 * 40 + 10 * 40) + 4.0 * 6 * 10);
    EXPECT_GT(calls[0].seconds, 0);
    Gemm plain = gemm;
    plain.c = d.view();
    ops_->gemm(plain, aligned(room));
    EXPECT_TRUE(d.same_values(c));
}

TEST_F(TimedOperations, attention_counts_the_keys_that_are_seen) {
    Attention s{1, 8, 1, 1, 4, 0.5, DType::f32, 0};
    Matrix q(DType::f32, 8, 4), out(q);
    q.random(1);
    std::vector<float> lse(8);
    const auto flops = [&] {
        auto room = scratch_of(ops_->attention_forward_scratch_bytes(s));
        timed_.begin(TimedOps::Mode::time);
        timed_.ops().attention_forward(s, q.view(), q.view(), q.view(), out.view(), lse.data(),
                                       aligned(room));
        return timed_.take().at(0).flops;
    };
    EXPECT_EQ(flops(), 4.0 * 4 * (8 * 9 / 2));
    s.window = 2;
    EXPECT_EQ(flops(), 4.0 * 4 * (1 + 7 * 2));
}

// Of a pair of parts as well: of its own square what the causal mask leaves, and no more than a
// window or a pattern.
TEST_F(TimedOperations, attention_of_parts_counts_the_keys_that_are_seen) {
    Attention s{1, 200, 1, 1, 4, 0.5, DType::f32, 0};
    Matrix q(DType::f32, 100, 4), out(q);
    q.random(1);
    std::vector<float> lse(100);
    PartAttention& parts = *part_attention_of(timed_.ops());
    const auto flops = [&](const SequencePart& keys) {
        auto room = scratch_of(parts.part_scratch_bytes(s, 100, 100));
        timed_.begin(TimedOps::Mode::time);
        parts.part_forward(s, {100, 100}, keys, q.view(), q.view(), q.view(), out.view(),
                           lse.data(), aligned(room));
        return timed_.take().at(0).flops;
    };
    EXPECT_EQ(flops({100, 100}), 4.0 * 4 * (100 * 101 / 2));
    EXPECT_EQ(flops({0, 100}), 4.0 * 4 * 100 * 100);
    s.window = 11;
    EXPECT_EQ(flops({0, 100}), 4.0 * 4 * (10 * 11 / 2));
    s.window = 0;
    BlockLists lists{.blocks = 4, .row_starts = {0, 1, 2, 4, 5}, .columns = {0, 1, 0, 2, 3}};
    lists.transpose();
    s.pattern = &lists;
    s.blocks = lists.view();
    // Queries 128 to 191 see keys 0 to 63; 100 to 127 those of their own block from 64 on.
    EXPECT_EQ(flops({0, 100}), 4.0 * 4 * (64 * 64 + 28 * 36));
}

TEST_F(TimedOperations, nothing_is_noted_before_begin_or_after_take) {
    Matrix x(DType::f32, 4, 16), y(x);
    x.random(3);
    timed_.ops().cast(x.view(), y.view());
    timed_.begin(TimedOps::Mode::time);
    timed_.note({.name = "mine"}, [] {});
    const std::vector<OpCall> calls = timed_.take();
    ASSERT_EQ(calls.size(), 1U);
    EXPECT_EQ(calls[0].name, "mine");
    timed_.ops().cast(x.view(), y.view());
    EXPECT_TRUE(timed_.take().empty());
    EXPECT_TRUE(y.same_values(x));
}

}  // namespace
}  // namespace ferry::ops
