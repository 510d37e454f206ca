// What `ferry plan` says of a model's shape, without a GPU (train/prediction/slow_shapes.h).
#include "train/prediction/slow_shapes.h"

#include <gtest/gtest.h>

namespace ferry::train {
namespace {

model::Shape usual() {
    model::Shape shape;
    shape.hidden = 4096, shape.layers = 32, shape.heads = 32, shape.kv_heads = 8;
    shape.head_dim = 128, shape.intermediate = 14336, shape.vocab = 128256;
    return shape;
}
std::vector<ops::SlowPath> slow(const model::Shape& shape) {
    model::Numerics numerics;
    numerics.sequence = 1024, numerics.micro_batch = 4;
    numerics.compute = numerics.residual = DType::bf16;
    return slow_shapes(shape, numerics, 3);
}

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

}  // namespace
}  // namespace ferry::train
