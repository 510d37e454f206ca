// Dynamic loss scaling: its rule, and whole runs in fp16.
#include <gtest/gtest.h>

#include "ferry/device.h"
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

class Fp16 : public testing::TestWithParam<std::string> {
protected:
    void SetUp() override {
        if (GetParam() == "cpu") return;
        try {
            Device::open(device_from(GetParam()), *executor_);
        } catch (const Error& error) {
            GTEST_SKIP() << error.what();
        }
    }
    Config config() const {
        Config config = tiny_config(data_);
        config.device = device_from(GetParam());
        return config;
    }
    TinyOutcome run(Config config, DType precision = DType::f16) {
        config.precision = precision;
        config.numerics.wire = std::nullopt;
        return run_tiny(config, {.executor = executor_.get()});
    }
    TinyData data_;
    std::unique_ptr<Executor> executor_ = make_thread_executor();
};

TEST_P(Fp16, LossesAreNearThoseOfFp32) {
    const TinyOutcome exact = run(config(), DType::f32), half = run(config());
    ASSERT_EQ(half.report.skipped_steps, 0);
    for (size_t step = 0; step < exact.losses.size(); ++step)
        EXPECT_NEAR(half.losses[step], exact.losses[step], 2e-3) << step;
}

TEST_P(Fp16, PlacementsAndSpeculationChangeNoBit) {
    const TinyOutcome in_memory = run(config());
    const TemporaryDirectory directory;
    for (const Speculate speculative : {Speculate::off, Speculate::all}) {
        SCOPED_TRACE(speculative == Speculate::all ? "all" : "off");
        Config tight = config();
        tight.budgets.nvme = {{.path = directory.path(), .size_bytes = 64 * kMiB}};
        tight.swap.state_on_nvme = 1;
        tight.swap.state_on_device = 0;
        tight.swap.groups = 2;
        tight.swap.speculate = speculative;
        tight.io.direct = false;  // the directory may be in memory
        const TinyOutcome same = run(tight);
        EXPECT_GT(same.report.paths.at(0).bytes_written, 0);
        EXPECT_EQ(same.hash, in_memory.hash);
        EXPECT_EQ(same.losses, in_memory.losses);
    }
}

TEST_P(Fp16, AnOverflowSkipsTheStepAndLeavesTheStateAlone) {
    Config config = this->config();
    config.steps = 1;
    config.precision = DType::f16;
    config.numerics.residual = DType::f32;
    // Gradients of a loss that is a sum over two targets instead of a mean over many: far too
    // large.
    config.batch = {.sequence = 1, .micro_batch = 1, .micro_batches = 1};
    config.model.norm_eps = 1e-30;
    const auto steep = Engine::make(config, {.executor = executor_.get()});
    const uint64_t before = steep->state_hash();
    const StepReport report = steep->step();
    EXPECT_TRUE(report.skipped);
    EXPECT_EQ(report.loss_scale, 65536);
    EXPECT_EQ(steep->state_hash(), before);
    EXPECT_EQ(steep->step().loss_scale, 32768);
}

INSTANTIATE_TEST_SUITE_P(All, Fp16, testing::Values("cpu", "cuda"),
                         [](const auto& one) { return one.param; });

}  // namespace
}  // namespace ferry::train
