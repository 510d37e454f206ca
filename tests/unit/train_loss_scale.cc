// Dynamic loss scaling: its rule, and whole runs in fp16.
#include <gtest/gtest.h>

#include "loss_scale.h"
#include "tests/support/tiny_run.h"

namespace ferry::train {
namespace {

TEST(LossScale, IsOneForEverWithoutScaling) {
    LossScale scale(false);
    for (int i = 0; i < 5000; ++i) scale.good_step();
    EXPECT_EQ(scale.value(), 1);
}

TEST(LossScale, DoublesAfter2000GoodStepsInARowAndHalvesAtOnce) {
    LossScale scale(true);
    EXPECT_EQ(scale.value(), 65536);
    for (int i = 0; i < 1999; ++i) scale.good_step();
    scale.overflow(2000);
    EXPECT_EQ(scale.value(), 32768);
    for (int i = 0; i < 1999; ++i) scale.good_step();
    EXPECT_EQ(scale.value(), 32768);
    scale.good_step();
    EXPECT_EQ(scale.value(), 65536);
}

TEST(LossScale, StopsBelowOne) {
    LossScale scale(true);
    for (int step = 1; step <= 16; ++step) scale.overflow(step);
    EXPECT_EQ(scale.value(), 1);
    EXPECT_THROW(scale.overflow(17), Error);
}

TEST(LossScale, StopsAfterTwentySkipsInARow) {
    LossScale scale(true);
    for (int i = 0; i < 10 * 2000; ++i) scale.good_step();  // 2^26
    for (int step = 1; step < 20; ++step) scale.overflow(step);
    EXPECT_GT(scale.value(), 1);
    EXPECT_THROW(scale.overflow(20), Error);
}

class Fp16 : public testing::Test {
protected:
    // The loss of every step, and how many steps were skipped.
    TinyOutcome run(Config config) {
        config.precision = "fp16";
        config.numerics.wire = "auto";
        return run_tiny(config, {.executor = executor_.get()});
    }
    TinyData data_;
    std::unique_ptr<Executor> executor_ = make_thread_executor();
};

TEST_F(Fp16, LossesAreNearThoseOfFp32) {
    const Config config = tiny_config(data_);
    const TinyOutcome exact = run_tiny(config, {.executor = executor_.get()}), half = run(config);
    ASSERT_EQ(half.report.skipped_steps, 0);
    for (size_t step = 0; step < exact.losses.size(); ++step)
        EXPECT_NEAR(half.losses[step], exact.losses[step], 2e-3) << step;
}

TEST_F(Fp16, AnOverflowSkipsTheStepAndLeavesTheStateAlone) {
    Config config = tiny_config(data_);
    config.steps = 1;
    config.precision = "fp16";
    config.numerics.residual = "fp32";
    const auto engine = Engine::make(config, {.executor = executor_.get()});
    const uint64_t before = engine->state_hash();
    // Gradients of a loss that is a sum over two targets instead of a mean over many: far too
    // large.
    config.batch = {.sequence = 1, .micro_batch = 1, .micro_batches = 1};
    config.model.norm_eps = 1e-30;
    const auto steep = Engine::make(config, {.executor = executor_.get()});
    EXPECT_EQ(steep->state_hash(), before);
    const StepReport report = steep->step();
    EXPECT_TRUE(report.skipped);
    EXPECT_EQ(report.loss_scale, 65536);
    EXPECT_EQ(steep->state_hash(), before);
    EXPECT_EQ(steep->step().loss_scale, 32768);
}

}  // namespace
}  // namespace ferry::train
