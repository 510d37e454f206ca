// What ranks exchange, as plan, prediction and bound know it before they run.
#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

#include "cost/traffic.h"
#include "tests/contract/train_ranks_fixture.h"
#include "train/prediction/predictor.h"
#include "train/setup/from_config.h"

namespace ferry::train::of_ranks {
namespace {

// The bound's arithmetic, which knows no schedule, against what is recorded.
TEST_F(Ranks, MoveInAStepWhatTheBoundCounts) {
    Config config = this->config();
    config.freeze = {"*embed_tokens*", "*layers.0.*"};  // no backward pass through either
    for (const int ranks : {2, 3}) {
        for (const int64_t stage : {0, 1, 2, 3}) {
            config.zero.stage = stage;
            config.zero.compress = {
                .gradients = ranks == 2 ? CodecKind::int4 : CodecKind::none,
                .weights = stage == 3 && ranks == 2 ? CodecKind::int8 : CodecKind::none};
            const planner::Plan plan = Predictor::make(config, {.ranks = ranks, .on_a_host = ranks})
                                           ->plan(request_of(config));
            const double least = cost::comm_traffic(plan.layers, plan.partition, plan.compute,
                                                    plan.wire, Exchanged::gradients)
                                     .bytes();
            EXPECT_GT(least, 0);
            for (const ScheduleBytes& schedule : schedule_bytes(plan)) {
                if (schedule.name != "after a step without speculation") continue;
                EXPECT_EQ(schedule.bytes[static_cast<size_t>(swap::Lane::comm)], least)
                    << ranks << " ranks, stage " << stage;
            }
        }
    }
}

TEST_F(Ranks, MoveInAStepOfMomentumWhatTheBoundCounts) {
    Config config = this->config();
    config.optimizer.method = optim::Method::onebit_adam;
    config.optimizer.freeze_step = 1;
    for (const int64_t stage : {0, 1, 2, 3}) {
        config.zero.stage = stage;
        const auto predictor = Predictor::make(config, {.ranks = 3, .on_a_host = 3});
        const planner::Plan plan = predictor->plan(request_of(config));
        int64_t bytes = 0;
        const swap::Schedule step =
            record_step(plan, Previous::not_speculative, false, Exchanged::momentum);
        for (const swap::Task& task : step.tasks)
            bytes += task.lane == swap::Lane::comm ? task.bytes : 0;
        EXPECT_EQ(bytes, cost::comm_traffic(plan.layers, plan.partition, plan.compute, plan.wire,
                                            Exchanged::momentum)
                             .bytes())
            << "stage " << stage;
        const auto all = schedule_bytes(plan);
        const auto same = std::ranges::find(all, step.name, &ScheduleBytes::name);
        ASSERT_NE(same, all.end()) << step.name;
        EXPECT_EQ(same->exchanged, Exchanged::momentum);
        EXPECT_EQ(same->bytes[static_cast<size_t>(swap::Lane::comm)], bytes);
        // A slow network: the bound of a step of gradients, which are more, is none of this one.
        cost::Measurements measurements = predictor->assumed(plan);
        measurements.comm_bytes_per_s = 1e3;
        const Prediction slow =
            predictor->predict(request_of(config), plan, measurements, Exchanged::momentum);
        EXPECT_EQ(slow.bound_link, cost::Link::comm);
        EXPECT_DOUBLE_EQ(slow.bound_seconds, static_cast<double>(bytes) / 1e3);
        EXPECT_GE(slow.timeline.step_seconds, slow.bound_seconds);
    }
}

// What is left to send is the outcome.
TEST_F(Ranks, PredictALocalStepThatSendsNothing) {
    Config config = this->config();
    config.zero.stage = 0;
    config.optimizer = {.method = optim::Method::zeroone_adam,
                        .var_freeze_step = 3,
                        .local_step_scaler = 1,
                        .local_step_clipper = 3};
    const auto predictor = Predictor::make(config, {.ranks = 2, .on_a_host = 2});
    const planner::Plan plan = predictor->plan(request_of(config));
    cost::Measurements measurements = predictor->assumed(plan);
    measurements.comm_bytes_per_s = 1e3;
    const auto step = [&](Exchanged what) {
        return predictor->predict(request_of(config), plan, measurements, what);
    };
    const Prediction exchange = step(Exchanged::momentum), local = step(Exchanged::nothing);
    EXPECT_LT(local.timeline.step_seconds, 0.1 * exchange.timeline.step_seconds);
    EXPECT_GT(local.timeline.step_seconds, 0);
    EXPECT_EQ(local.bound_seconds, 0);
    EXPECT_EQ(local.schedule.name, "after a local step, exchanges momentum");
    EXPECT_LT(steady_bytes(plan, Exchanged::nothing).bytes[static_cast<size_t>(swap::Lane::comm)],
              1000);
}

// A link so slow that nothing else matters sets the prediction, its bound and any placement's.
TEST_F(Ranks, AreTheLinkThatBindsWhereItIsSlow) {
    Config config = this->config();
    const auto predictor = Predictor::make(config, {.ranks = 2, .on_a_host = 2});
    const planner::Plan plan = predictor->plan(request_of(config));
    cost::Measurements measurements = predictor->assumed(plan);
    const auto step = [&](double bytes_per_s, double overhead_s) {
        measurements.comm_bytes_per_s = bytes_per_s;
        measurements.comm_overhead_s = overhead_s;
        return predictor->predict(request_of(config), plan, measurements);
    };
    EXPECT_NE(step(1e15, 0).binding().link, cost::Link::comm);
    const Prediction slow = step(1e3, 0);
    const double bytes = cost::comm_traffic(plan.layers, plan.partition, plan.compute, plan.wire,
                                            Exchanged::gradients)
                             .bytes();
    EXPECT_EQ(slow.binding().link, cost::Link::comm);
    EXPECT_EQ(slow.bound_link, cost::Link::comm);
    EXPECT_DOUBLE_EQ(slow.bound_seconds, bytes / 1e3);
    EXPECT_DOUBLE_EQ(slow.binding().seconds, slow.bound_seconds);
    EXPECT_GE(slow.timeline.step_seconds, slow.bound_seconds);
    // Calls that take long bind as well, and no placement is to blame for them.
    const Prediction late = step(1e15, 10);
    EXPECT_EQ(late.binding().link, cost::Link::comm);
    EXPECT_NE(late.bound_link, cost::Link::comm);
    EXPECT_GE(late.timeline.step_seconds, late.binding().seconds);
}

// All at the same time; stages of a pipeline have kernels that the others have not.
TEST_F(Ranks, MeasureTogether) {
    Config config = this->config();
    if (config.device != DeviceKind::cpu) GTEST_SKIP() << "not on a GPU";
    for (const int ranks : {2, 4}) {
        for (const int stages : {1, 2}) {
            if (comm::ranks_launched() > 0 && comm::ranks_launched() != ranks) continue;
            config.parallel.pipeline = stages;
            config.zero.stage = stages == 1 ? 3 : 1;
            std::vector<double> seconds(static_cast<size_t>(ranks));
            const auto measure = [&](int rank, Engine& engine) {
                engine.step();
                engine.measure_bound();
                engine.step();
                seconds[static_cast<size_t>(rank)] = engine.report().predicted_seconds;
            };
            const auto found = problems(
                ranks, [&](int) { return config; }, measure);
            for (const Problem& problem : found)
                EXPECT_EQ(problem.what, "") << ranks << " ranks, " << stages << " stages";
            if (comm::ranks_launched() > 0) continue;
            EXPECT_GT(std::ranges::min(seconds), 0) << ranks << " ranks, " << stages << " stages";
        }
    }
}

// One process stands for the ranks of a host, and finds what they would.
TEST_F(Ranks, AreTimedAtOnceByAPlan) {
    Config plain = this->config();
    if (comm::ranks_launched() > 0 || plain.device != DeviceKind::cpu) GTEST_SKIP() << "alone";
    plain.threads = 4;
    Config staged = plain, momentum = plain;
    staged.parallel.pipeline = 2;
    momentum.optimizer.method = optim::Method::onebit_adam;
    momentum.optimizer.freeze_step = 1;
    for (const Config& config : {plain, staged, momentum}) {
        const auto predictor = Predictor::make(config, {.ranks = 2, .on_a_host = 2, .here = 3});
        const planner::Plan plan = predictor->plan(request_of(config));
        const cost::Measurements found = predictor->measure(plan, Predictor::Memory::of_plan);
        EXPECT_EQ(predictor->at_once(), 3);
        EXPECT_EQ(predictor->measured_at_once(), 3);
        EXPECT_EQ(found.memory_of, cost::Of::rank);
        EXPECT_GT(found.dram_bytes_per_s, 0);
        EXPECT_EQ(found.momentum_bytes_per_s > 0, plan.has_feedback());
        EXPECT_TRUE(predictor->covers(plan, found.kernels));
        EXPECT_GT(predictor->predict(request_of(config), plan, found).timeline.step_seconds, 0);
    }
}

TEST_F(Ranks, HaveNoBoundWhereSomeStepsExchangeMomentum) {
    Config config = this->config();
    if (config.device != DeviceKind::cpu) GTEST_SKIP() << "not on a GPU";
    config.steps = 4;
    for (const auto method : {optim::Method::adamw, optim::Method::onebit_adam}) {
        config.optimizer.method = method;
        config.optimizer.freeze_step = method == optim::Method::adamw ? 0 : 1;
        const auto measure = [&](int, Engine& engine) {
            engine.measure_bound();
            const RunReport report = engine.report();
            EXPECT_GT(report.predicted_seconds, 0);
            EXPECT_EQ(report.predicted_momentum_seconds > 0, method != optim::Method::adamw);
            EXPECT_EQ(report.predicted_local_seconds, 0);
            EXPECT_EQ(report.bound_seconds > 0, method == optim::Method::adamw);
        };
        for (const Problem& problem : problems(
                 2, [&](int) { return config; }, measure))
            EXPECT_EQ(problem.what, "");
    }
}

}  // namespace
}  // namespace ferry::train::of_ranks
