// What `ferry plan` says of a model's shape, without a GPU (train/prediction/slow_shapes.h).
#include "train/prediction/slow_shapes.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace ferry::train {
namespace {

model::Shape usual() {
    model::Shape shape;
    shape.hidden = 4096, shape.layers = 32, shape.heads = 32, shape.kv_heads = 8;
    shape.head_dim = 128, shape.intermediate = 14336, shape.vocab = 128256;
    return shape;
}
// Of some operations, and of those by how much a width misses a multiple of 8.
constexpr WidthCost kCosts[] = {
    {Width::hidden, WideOp::products, {2, 3, 4}},
    {Width::hidden, WideOp::norm_forward, {1.5, 1.5, 1.02}},
    {Width::intermediate, WideOp::products, {2, 3, 5}},
    {Width::intermediate, WideOp::activation_backward, {1, 1.5, 2}},
};
std::vector<ops::SlowPath> slow(const model::Shape& shape, DType compute = DType::bf16) {
    model::Numerics numerics;
    numerics.sequence = 1024, numerics.micro_batch = 4;
    numerics.compute = numerics.residual = compute;
    return slow_shapes(shape, numerics, 3, kCosts);
}
std::vector<std::string> names(const std::vector<ops::SlowPath>& found) {
    std::vector<std::string> all;
    for (const ops::SlowPath& path : found) all.push_back(path.operation + ", " + path.shape);
    return all;
}
double factor(const ops::SlowPath& path) { return path.seconds / path.fast_seconds; }

TEST(SlowShapes, usual_ones_have_none) {
    model::Shape shape = usual();
    EXPECT_TRUE(slow(shape).empty());
    shape.head_norms = true;
    shape.hidden = 8192;
    EXPECT_TRUE(slow(shape).empty());
}

TEST(SlowShapes, wide_rows_are_read_again) {
    model::Shape shape = usual();
    shape.hidden = 8200;
    const auto found = slow(shape);
    ASSERT_EQ(found.size(), 2U);
    EXPECT_EQ(found[0].operation, "norm forward");
    EXPECT_EQ(found[0].shape, "4096 x 8200");
    EXPECT_EQ(found[0].times, 65 * 3);
    EXPECT_DOUBLE_EQ(found[0].seconds / found[0].fast_seconds, 1.5);
    EXPECT_EQ(found[1].operation, "norm backward");
    EXPECT_DOUBLE_EQ(found[1].seconds / found[1].fast_seconds, 1.5);
}

TEST(SlowShapes, heads_that_are_turned_apart) {
    model::Shape shape = usual();
    shape.head_norms = true, shape.head_dim = 64;
    const auto found = slow(shape);
    ASSERT_EQ(found.size(), 2U);
    EXPECT_EQ(found[0].operation, "norm and rope forward");
    EXPECT_EQ(found[0].shape, "4096 x 2560");
    EXPECT_EQ(found[0].times, 32 * 3);
    EXPECT_DOUBLE_EQ(found[0].seconds / found[0].fast_seconds, 2);
    EXPECT_EQ(found[1].operation, "norm and rope backward");
}

TEST(SlowShapes, an_odd_vocabulary) {
    model::Shape shape = usual();
    shape.vocab = 50257;
    const auto found = slow(shape);
    ASSERT_EQ(found.size(), 1U);
    EXPECT_EQ(found[0].operation, "product with 50257 words");
    EXPECT_EQ(found[0].shape, "4096 x 4096");
    EXPECT_EQ(found[0].times, 3);
    EXPECT_GT(found[0].seconds, found[0].fast_seconds);
}

TEST(SlowShapes, an_odd_hidden_width) {
    model::Shape shape = usual();
    shape.hidden = 4092;
    const auto found = slow(shape);
    // Queries, keys, values and their output; gate, up and down. Behind the blocks, the head.
    const std::vector<std::string> expected = {"products, 4096 x 4092 x 53248",
                                               "products, 4096 x 4092 x 128256",
                                               "norm forward, 4096 x 4092"};
    EXPECT_EQ(names(found), expected);
    EXPECT_EQ(found[0].times, 32 * 3);
    EXPECT_EQ(found[1].times, 3);
    EXPECT_DOUBLE_EQ(factor(found[0]), 2);
    EXPECT_DOUBLE_EQ(factor(found[2]), 1.5);
    EXPECT_NE(found[0].why.find("hidden 4092 is no multiple of 8: 2 times"), std::string::npos)
        << found[0].why;
}

TEST(SlowShapes, what_a_width_misses_decides_and_little_is_not_named) {
    model::Shape shape = usual();
    shape.hidden = 4094;
    EXPECT_DOUBLE_EQ(factor(slow(shape)[0]), 3);
    shape.hidden = 4095;  // 1.02 times as long a norm is not named
    const auto found = slow(shape);
    ASSERT_EQ(found.size(), 2U);
    EXPECT_DOUBLE_EQ(factor(found[0]), 4);
}

TEST(SlowShapes, an_odd_intermediate_width) {
    model::Shape shape = usual();
    shape.intermediate = 14335;
    const std::vector<std::string> expected = {"products, 4096 x 14335 x 12288",
                                               "swiglu backward, 4096 x 14335"};
    EXPECT_EQ(names(slow(shape)), expected);
    shape.intermediate = 14332, shape.gated = false;
    EXPECT_EQ(names(slow(shape)), std::vector<std::string>{"products, 4096 x 14332 x 8192"});
    shape.hidden = 4095;  // its products are among those of the hidden width
    EXPECT_EQ(names(slow(shape)).size(), 2U);
}

TEST(SlowShapes, odd_queries_and_keys) {
    model::Shape shape = usual();
    shape.heads = 31, shape.kv_heads = 1, shape.head_dim = 126;
    const std::vector<std::string> expected = {"products, 4096 x 4158 x 4096",
                                               "products, 4096 x 3906 x 4096"};
    EXPECT_EQ(names(slow(shape)), expected);
}

TEST(SlowShapes, single_precision_was_not_measured) {
    model::Shape shape = usual();
    shape.hidden = 4095, shape.vocab = 50257;
    EXPECT_TRUE(slow(shape, DType::f32).empty());
}

}  // namespace
}  // namespace ferry::train
