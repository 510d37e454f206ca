#include "train/run/clipped_share.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "planner/work.h"
#include "tests/support/tiny_run.h"
#include "train/inside.h"
#include "train/setup/from_config.h"

namespace ferry::train {
namespace {

// 2.9 B parameters beside a GPU of which 20 GiB may be taken: what blocks keep for backward and
// optimizer state want the same memory.
class ClippedShare : public testing::Test {
protected:
    ClippedShare() {
        config_.device = DeviceKind::cuda;
        config_.precision = DType::bf16;
        config_.model = {.hidden = 3072,
                         .layers = 28,
                         .heads = 24,
                         .kv_heads = 8,
                         .head_dim = 128,
                         .intermediate = 8192,
                         .vocab = 32000,
                         .tie_embeddings = true};
        config_.batch = {.sequence = 2048, .micro_batch = 8, .micro_batches = 1};
        config_.budgets.device_bytes = 20 * kGiB;
        config_.budgets.host_bytes = 100 * kGiB;
        config_.clip_norm = 1;
        predictor_ = Predictor::make(
            config_, {},
            {.architecture = "cuda sm_90", .needs = {.overhead = 700 * kMiB}, .threads = 16});
        const cost::Measurements known{.copy_bytes_per_s = 5.4e10,
                                       .dram_bytes_per_s = 1.9e11,
                                       .update_overhead_s = 1.1e-4,
                                       .out_of_place = 1,
                                       .check_bytes_per_s = 1.5e10,
                                       .threads = 16,
                                       .device_bytes_per_s = 4e12,
                                       .computes_on_host = false};
        predictor_->plan_by(known);
        plan_ = predictor_->plan(request_of(config_));
        const cost::Measurements assumed = predictor_->assumed(plan_);
        measurements_ = cost::known_or(known, assumed);
        measurements_.update_overhead_s = assumed.update_overhead_s;
        measurements_.kernels = assumed.kernels;
    }
    planner::Plan expecting(double clipped) {
        planner::PlanRequest request = request_of(config_);
        request.swap.expect_clipped = asked_for_ = clipped;
        return predictor_->plan(request);
    }
    std::string saved(const planner::Plan& plan, int64_t clipped, int64_t steps,
                      int64_t skipped = 0) {
        return saved_by_expecting(
            {.steps = steps + skipped, .clipped_steps = clipped, .skipped_steps = skipped}, plan,
            [this](double share) { return expecting(share); }, measurements_);
    }

    Config config_;
    std::unique_ptr<Predictor> predictor_;
    planner::Plan plan_;
    cost::Measurements measurements_;
    double asked_for_ = -1;
};

TEST_F(ClippedShare, IsNamedWhereThePlanWasMadeForAnother) {
    const std::string said = saved(plan_, 4, 400, 7);
    EXPECT_NE(said.find("4 of 400 steps were clipped"), std::string::npos) << said;
    EXPECT_NE(said.find("swap.expect_clipped=0.01)"), std::string::npos) << said;
    const StepKinds was = predict_kinds(plan_, measurements_),
                    is = predict_kinds(expecting(0.01), measurements_);
    EXPECT_LT(is.mean(0.01), 0.98 * was.mean(0.01));
    EXPECT_GT(is.not_speculative, was.not_speculative) << "what a clipped step pays for it";
    EXPECT_DOUBLE_EQ(was.mean(0.25), 0.75 * was.committed + 0.25 * was.not_speculative);

    const planner::Plan unclipped = expecting(0);
    EXPECT_EQ(saved(unclipped, 4, 400), "");
    EXPECT_NE(saved(unclipped, 400, 400), "") << "the expectation may be wrong the other way";
    EXPECT_EQ(asked_for_, 1);
}

TEST_F(ClippedShare, IsLeftAtThatWhereLittleWouldBeSaved) {
    EXPECT_EQ(saved(plan_, 400, 400), "");
    EXPECT_EQ(asked_for_, 1);
}

TEST_F(ClippedShare, OfAFewStepsSaysNothing) {
    EXPECT_EQ(saved(plan_, 0, 19), "");
    EXPECT_EQ(saved(plan_, 0, 19, 30), "") << "skipped ones have no norm to clip";
    EXPECT_EQ(asked_for_, -1) << "nothing is planned for it";
    EXPECT_NE(saved(plan_, 0, 20), "");
}

TEST_F(ClippedShare, OfAPlanThatCannotBeMadeSaysNothing) {
    const auto expecting = [](double) -> planner::Plan {
        throw Error(Trouble::does_not_fit, {.what = "too small"});
    };
    EXPECT_EQ(saved_by_expecting({.steps = 400}, plan_, expecting, measurements_), "");
}

TEST_F(ClippedShare, OfAPlanWithoutSpeculationSaysNothing) {
    config_.swap.speculate = Speculate::off;
    EXPECT_EQ(saved(predictor_->plan(request_of(config_)), 0, 400), "");
    EXPECT_EQ(asked_for_, -1);
}

// Measurements of a machine that computes beside the host, a hundred times as fast as it updates.
cost::Measurements measured_of(const Config& config) {
    const auto predictor = Predictor::make(config);
    const planner::Plan plan = predictor->plan(request_of(config));
    const cost::KernelTimes assumed = predictor->assumed(plan).kernels;
    cost::Measurements found{.copy_bytes_per_s = 1e12,
                             .nvme_bytes_per_s = 1e9,
                             .dram_bytes_per_s = 1e9,
                             .out_of_place = 1,
                             .check_bytes_per_s = 1e10,
                             .device_bytes_per_s = 1e12,
                             .computes_on_host = false,
                             .kernels = assumed};
    const Prediction prediction = predictor->predict(request_of(config), plan, found);
    const double step_s = found.kernels.sum(prediction.schedule, planner::work_of(plan));
    double backward_s = 0;
    for (auto& [kind, seconds] : found.kernels.seconds) {
        seconds *= 1e-3 / step_s;
        if (kind[0] == static_cast<int64_t>(cost::Op::backward))
            backward_s = std::max(backward_s, seconds);
    }
    found.kernels.saved_s = {0.1 * backward_s, 0.4 * backward_s};
    return found;
}

TEST(Run, SaysWhatExpectingItsClippedShareWouldHaveSaved) {
    const TinyData data;
    Config config = tiny_config(data);
    config.model.layers = 6;
    config.batch = {.sequence = 8, .micro_batch = 4, .micro_batches = 1};
    config.clip_norm = 1e6;
    config.budgets = {.device_bytes = 1000 * kKiB, .host_bytes = 16 * kMiB};
    config.swap.state_on_device = 1;
    const cost::Measurements measurements = measured_of(config);
    const auto executor = make_thread_executor();
    const auto engine =
        Engine::make(config, with({.executor = executor.get()}, {.measurements = &measurements}));
    const auto said = [&] {
        testing::internal::CaptureStderr();
        engine->measure_bound();
        return testing::internal::GetCapturedStderr();
    };
    EXPECT_EQ(said().find("were clipped"), std::string::npos) << "there was no step yet";
    for (int step = 0; step < 20; ++step) engine->step();
    const std::string then = said();
    EXPECT_NE(then.find("0 of 20 steps were clipped"), std::string::npos) << then;
    EXPECT_NE(then.find("(swap.expect_clipped=0)"), std::string::npos) << then;
}

}  // namespace
}  // namespace ferry::train
