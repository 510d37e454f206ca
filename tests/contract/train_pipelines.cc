// Pipelines of ranks: what is planned of them before they run.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <spdlog/fmt/fmt.h>

#include "cost/traffic.h"
#include "tests/contract/train_pipelines_fixture.h"
#include "tests/support/quick.h"
#include "tests/support/run_ranks.h"
#include "train/inside.h"
#include "train/measuring/model_on_device.h"
#include "train/prediction/predictor.h"
#include "train/setup/from_config.h"

namespace ferry::train {
namespace {

// To the byte, of every rank: its memory, and what it passes on in a step.
TEST_F(PlannedPipeline, AsTheyRun) {
    using enum PipelineSchedule;
    Spread spread(3);
    for (const RankCut cut : {RankCut{2, 2}, RankCut{4, 2}, RankCut{3, 3}, RankCut{4, 2, 2},
                              RankCut{8, 2, 2}, RankCut{2, 2, 1, interleaved, 2},
                              RankCut{2, 2, 1, round_robin, 2}, RankCut{4, 2, 2, round_robin, 2}}) {
        for (const bool tight : {false, true}) {
            if (!spread.takes()) continue;
            SCOPED_TRACE(testing::Message() << testing::PrintToString(cut) << " tight " << tight);
            Config config = this->config(true);
            if (!tight) config.parallel.schedule = zero_bubble;
            if (tight) {
                config.zero.stage = 3;
                config.budgets.nvme = {{.path = storage_.path(), .size_bytes = 64 * kMiB}};
                config.budgets.host_bytes = cut.ranks * 4 * kMiB;
                config.swap.state_on_nvme = 0.5;
                config.swap.groups = 2;
                config.io.direct = false;
            }
            const auto planned = predictor(config, cut);
            const auto plans = planned->plans(request_of(staged(config, cut)));
            ASSERT_EQ(std::ssize(plans), cut.stages);
            const Prediction step = planned->predict(request_of(staged(config, cut)), plans[0],
                                                     planned->assumed(plans[0]));
            on_ranks(config, cut, "", [&](Engine& engine, int rank) {
                const auto stage = static_cast<size_t>(rank / cut.of_a_stage());
                const planner::Plan &mine = Inside(engine).plan(), &expected = plans[stage];
                EXPECT_EQ(mine.partition.stage.first, expected.partition.stage.first);
                EXPECT_EQ(mine.device_bytes, expected.device_bytes);
                EXPECT_EQ(mine.host_bytes, expected.host_bytes);
                EXPECT_EQ(mine.nvme_bytes, expected.nvme_bytes);
                EXPECT_EQ(mine.groups, expected.groups);
                EXPECT_EQ(mine.chunk_elements, expected.chunk_elements);
                engine.step();
                int64_t sent = 0;
                for (const CollectiveReport& of : engine.report().collectives)
                    if (of.collective == "pass on") sent += of.sent_bytes;
                const StagePrediction& expects = step.stages[stage];
                EXPECT_EQ(sent, expects.to_next + expects.to_previous + expects.of_table);
            });
            if (HasFailure()) return;
        }
    }
}

// The bound's arithmetic, which knows no schedule, against what is recorded: the copy of a tied
// table is no layer whose gradients or updates the last stage shares.
TEST_F(PlannedPipeline, MoveInAStepWhatTheBoundCounts) {
    for (const bool tied : {false, true}) {
        Config config = this->config(tied);
        config.freeze = {"*layers.3.*"};
        for (const int64_t stage : {0, 1, 2}) {
            config.zero.stage = stage;
            const RankCut cut{6, 3};
            for (const planner::Plan& plan :
                 predictor(config, cut)->plans(request_of(staged(config, cut)))) {
                int64_t bytes = 0;
                for (const swap::Task& task :
                     record_step(plan, Previous::not_speculative, false).tasks)
                    if (task.lane == swap::Lane::comm && !cost::passes(task)) bytes += task.bytes;
                EXPECT_EQ(bytes, cost::comm_traffic(plan.layers, plan.partition, plan.compute,
                                                    plan.wire, Exchanged::gradients)
                                     .bytes())
                    << "tied " << tied << ", zero.stage " << stage << ", stage "
                    << plan.partition.stage.index;
            }
        }
    }
}

// The stage with the head multiplies by a tied table, which comes to it after each update, and from
// where it lies where it is frozen.
TEST_F(PlannedPipeline, ReadATiedTableOnce) {
    const RankCut cut{2, 2};
    const auto read_by = [&](const Config& config) {
        const model::Shape shape{.hidden = config.model.hidden,
                                 .vocab = config.model.vocab,
                                 .tie_embeddings = config.model.tie_embeddings};
        std::vector<double> found;
        for (const planner::Plan& plan :
             predictor(config, cut)->plans(request_of(staged(config, cut))))
            found.push_back(
                cost::weight_traffic(plan.layers, shape, 8, plan.compute, plan.partition)
                    .read_bytes);
        return found;
    };
    Config config = this->config(true, 4);
    const auto plans = predictor(config, cut)->plans(request_of(staged(config, cut)));
    const auto table = static_cast<double>(4 * plans[1].layers[0].elements);
    const std::vector<double> tied = read_by(config), apart = read_by(this->config(false, 4));
    config.freeze = {"*embed_tokens*"};
    const std::vector<double> frozen = read_by(config);
    EXPECT_DOUBLE_EQ(tied[0], apart[0]);
    EXPECT_DOUBLE_EQ(frozen[0], tied[0]);
    EXPECT_DOUBLE_EQ(frozen[1] - tied[1], table);
}

// Where blocks are all that takes time, a step is as long as theory says, whatever the numbers of
// stages and groups.
TEST_F(PlannedPipeline, WaitAsTheorySays) {
    using enum PipelineSchedule;
    for (const PipelineSchedule schedule : {one_f_one_b, zero_bubble}) {
        for (const int stages : {2, 4}) {
            for (const int64_t groups : {2, 4, 8}) {
                SCOPED_TRACE(testing::Message() << stages << " stages, " << groups << " groups, "
                                                << (schedule == zero_bubble ? "zero bubble" : ""));
                Config config = this->config(false, 4);
                config.swap.groups = groups;
                config.parallel.schedule = schedule;
                expect_to_wait_as_theory_says(config, {stages, stages});
                if (HasFailure()) return;
            }
        }
    }
}

// And in several virtual stages of one block or more, where the groups divide by the stages or not.
TEST_F(PlannedPipeline, WaitInSeveralVirtualStagesAsTheorySays) {
    using enum PipelineSchedule;
    struct Case {
        PipelineSchedule schedule;
        int stages, virtual_stages;
        int64_t blocks, micro_batches, groups;
    };
    for (const Case& of : {Case{interleaved, 2, 2, 4, 8, 8}, Case{interleaved, 2, 4, 8, 6, 6},
                           Case{interleaved, 4, 2, 8, 8, 8}, Case{interleaved, 4, 2, 8, 7, 7},
                           Case{interleaved, 4, 2, 16, 8, 8}, Case{interleaved, 4, 2, 8, 2, 2},
                           Case{interleaved, 2, 2, 8, 8, 4}, Case{round_robin, 2, 2, 4, 8, 1},
                           Case{round_robin, 4, 2, 8, 8, 1}, Case{round_robin, 4, 2, 8, 2, 1},
                           Case{round_robin, 4, 2, 16, 8, 1}, Case{round_robin, 4, 2, 8, 8, 8},
                           Case{round_robin, 2, 1, 2, 8, 1}}) {
        SCOPED_TRACE(testing::Message()
                     << (of.schedule == interleaved ? "interleaved, " : "round robin, ")
                     << of.stages << " stages, " << of.virtual_stages << " each of " << of.blocks
                     << " blocks, " << of.groups << " groups of " << of.micro_batches);
        Config config = this->config(false, of.blocks);
        config.batch.micro_batches = of.micro_batches;
        config.swap.groups = of.groups;
        expect_to_wait_as_theory_says(config,
                                      {of.stages, of.stages, 1, of.schedule, of.virtual_stages});
    }
}

// A long step by two short ones, beside a simulation of all of it.
TEST_F(PlannedPipeline, ShortStepsAreAsFarAsTheySayFromTheWholeStep) {
    using enum PipelineSchedule;
    Spread spread(5);
    double least = 1, most = 1;
    for (const PipelineSchedule schedule : {one_f_one_b, zero_bubble, interleaved, round_robin}) {
        for (const int stages : {2, 4, 8}) {
            for (const int64_t micro_batches : {4, 8, 16, 32}) {
                for (const int64_t zero_stage : {0, 1, 3}) {
                    for (const double network : {0.0, 3e8}) {
                        if (micro_batches <= 3 * stages || !spread.takes()) continue;
                        SCOPED_TRACE(testing::Message()
                                     << name_of(schedule) << ", " << stages << " stages, "
                                     << micro_batches << " micro-batches, zero.stage " << zero_stage
                                     << ", network " << network);
                        Config config = this->config(false, 2 * stages);
                        config.model.hidden = 256;
                        config.model.head_dim = 64;
                        config.model.intermediate = 768;
                        config.batch.sequence = 128;
                        config.batch.micro_batches = 2 * micro_batches;
                        config.zero.stage = zero_stage;
                        config.budgets.device_bytes = config.budgets.host_bytes = kUnlimited;
                        config.swap.chunk_elements = 65536;
                        const bool several = schedule == interleaved || schedule == round_robin;
                        const RankCut cut{2 * stages, stages, 1, schedule, several ? 2 : 1};
                        const auto planned = predictor(config, cut);
                        const std::vector<planner::Plan> plans =
                            planned->plans(request_of(staged(config, cut)));
                        ASSERT_TRUE(short_steps_of(plans, 0));
                        cost::Measurements measured = planned->assumed(plans[0]);
                        if (network > 0)
                            measured.between_stages = {.bytes_per_s = network, .overhead_s = 1e-4};
                        const ModelOnDevice model(staged(config, cut),
                                                  {.ranks = cut.ranks, .on_a_host = cut.ranks},
                                                  std::nullopt);
                        const auto seconds = [&](int64_t most_visits) {
                            return simulate_stages(plans, false, model.decoder, measured,
                                                   most_visits)
                                .front()
                                .seconds;
                        };
                        const double whole_s = seconds(std::numeric_limits<int32_t>::max()),
                                     ratio = seconds(0) / whole_s;
                        EXPECT_NEAR(ratio, 1, kShortStepsErr);
                        least = std::min(least, ratio);
                        most = std::max(most, ratio);
                    }
                }
            }
        }
    }
    RecordProperty("least", fmt::format("{:.4f}", least));
    RecordProperty("most", fmt::format("{:.4f}", most));
}

// A network among the replicas binds short steps, and kernels the long one.
TEST_F(PlannedPipeline, ShortStepsAreNoShorterThanTheKernels) {
    const Config config = with_a_long_step();
    const RankCut cut{4, 2, 1, PipelineSchedule::round_robin, 2};
    const auto planned = predictor(config, cut);
    const planner::PlanRequest request = request_of(staged(config, cut));
    const planner::Plan plan = planned->plan(request);
    cost::Measurements slow = planned->assumed(plan);
    const double kernels_s = planned->predict(request, plan, slow).stages.front().compute_seconds;
    // As long as two fifths of the step's kernels.
    slow.comm_bytes_per_s = bytes_of_gradients(plan) / (0.4 * kernels_s);
    const Prediction found = planned->predict(request, plan, slow);
    ASSERT_TRUE(found.by);
    for (const StagePrediction& stage : found.stages) {
        EXPECT_GE(found.step_seconds, stage.compute_seconds);
        EXPECT_GE(stage.waits, 0);
    }
    const std::vector<planner::Plan> plans = planned->plans(request);
    const ModelOnDevice model(staged(config, cut), {.ranks = cut.ranks, .on_a_host = cut.ranks},
                              std::nullopt);
    const auto seconds = [&](int64_t most_visits) {
        return simulate_stages(plans, false, model.decoder, slow, most_visits).front().seconds;
    };
    EXPECT_NEAR(seconds(0) / seconds(std::numeric_limits<int32_t>::max()), 1, 0.15);
}

// What stages wait for each other takes its time, whatever the short steps have to exchange.
TEST_F(PlannedPipeline, NoLongStepIsShorterOverASlowerNetwork) {
    const Config config = with_a_long_step();
    const RankCut cut{4, 2, 1, PipelineSchedule::round_robin, 1};
    const auto planned = predictor(config, cut);
    const planner::PlanRequest request = request_of(staged(config, cut));
    const planner::Plan plan = planned->plan(request);
    cost::Measurements fast = planned->assumed(plan);
    // Passing a micro-batch on takes as long as its kernels, so that stages wait for each other.
    const double kernels_s = planned->predict(request, plan, fast).stages.front().compute_seconds;
    const double passed = static_cast<double>(plan.input_bytes * plan.micro_batches);
    fast.between_stages = {.bytes_per_s = passed / kernels_s, .overhead_s = 1e-5};
    const Prediction at_once = planned->predict(request, plan, fast);
    ASSERT_TRUE(at_once.by);
    double before_s = at_once.step_seconds;
    for (const double part : {0.02, 0.05, 0.1, 0.2, 0.4}) {
        cost::Measurements slow = fast;
        slow.comm_bytes_per_s = bytes_of_gradients(plan) / (part * kernels_s);
        const double step_s = planned->predict(request, plan, slow).step_seconds;
        EXPECT_GE(step_s, 0.9 * before_s) << part;
        EXPECT_GE(step_s, 0.95 * at_once.step_seconds) << part;
        before_s = step_s;
    }
}

// A network between the stages that binds.
TEST_F(PlannedPipeline, TakeAsLongAsWhatTheyPass) {
    const Config config = this->config(false, 4);
    const RankCut cut{2, 2};
    const auto planned = predictor(config, cut);
    const planner::PlanRequest request = request_of(staged(config, cut));
    const planner::Plan plan = planned->plan(request);
    cost::Measurements slow = planned->assumed(plan);
    const double fast_s = planned->predict(request, plan, slow).timeline.step_seconds;
    slow.between_stages = {.bytes_per_s = 1e4, .overhead_s = 0};
    const Prediction step = planned->predict(request, plan, slow);
    const StagePrediction &first = step.stages[0], &second = step.stages[1];
    EXPECT_EQ(first.to_next, 8 * plan.input_bytes);
    EXPECT_EQ(second.to_previous, first.to_next);
    // Both ways share one order.
    const double passing_s = static_cast<double>(first.to_next + second.to_previous) / 1e4;
    EXPECT_GE(step.timeline.step_seconds, passing_s);
    EXPECT_LE(step.timeline.step_seconds, 1.2 * passing_s + fast_s);
    EXPECT_EQ(step.binding().link, cost::Link::comm);
    EXPECT_GT(first.waits, 0.9);
}

// A stage between others passes both ways at once as it is simulated, and its link takes longer.
TEST_F(PlannedPipeline, WaitTheRestOfTheStepThatIsPredicted) {
    const Config config = this->config(false, 4);
    const RankCut cut{4, 4};
    const auto planned = predictor(config, cut);
    const planner::PlanRequest request = request_of(staged(config, cut));
    const planner::Plan plan = planned->plan(request);
    cost::Measurements slow = planned->assumed(plan);
    slow.between_stages = {.bytes_per_s = 1e4, .overhead_s = 0};
    const Prediction step = planned->predict(request, plan, slow);
    EXPECT_GT(step.step_seconds, step.timeline.step_seconds);
    for (const StagePrediction& stage : step.stages)
        EXPECT_DOUBLE_EQ(stage.waits, 1 - stage.compute_seconds / step.step_seconds);
}

// A run predicts the step of all stages, as the plan does.
TEST_F(PlannedPipeline, ARunPredictsAllStages) {
    for (const RankCut cut : {RankCut{2, 2}, RankCut{4, 2}}) {
        SCOPED_TRACE(testing::PrintToString(cut));
        Config config = this->config(true, 5);
        config.swap.speculate = Speculate::off;
        config.parallel.schedule = PipelineSchedule::one_f_one_b;
        const auto planned = predictor(config, cut);
        const planner::PlanRequest request = request_of(staged(config, cut));
        cost::Measurements measured = planned->assumed(planned->plan(request));
        measured.between_stages = {.bytes_per_s = 1e6, .overhead_s = 1e-4};
        planned->plan_by(measured);
        const planner::Plan plan = planned->plan(request);
        const double expected_s = planned->predict(request, plan, measured).timeline.step_seconds;
        comm::on_run_ranks(
            cut.ranks, [&](std::unique_ptr<comm::Communicator> others, Executor& executor) {
                const auto engine = Engine::make(
                    staged(config, cut),
                    train::with({.executor = &executor},
                                {.measurements = &measured, .ranks = std::move(others)}));
                engine->step();
                engine->measure_bound();
                EXPECT_NEAR(engine->report().predicted_seconds, expected_s, 1e-9 * expected_s);
            });
    }
}

TEST_F(PlannedPipeline, WhereAStageDoesNotFitItIsNamed) {
    Config config = this->config(false);
    config.budgets.device_bytes = 4096;
    try {
        predictor(config, {2, 2})->plan(request_of(staged(config, {2, 2})));
        FAIL() << "it fits";
    } catch (const planner::DoesNotFit& refusal) {
        EXPECT_THAT(refusal.what(), testing::HasSubstr("stage 0 of 2"));
        EXPECT_GT(refusal.smallest(), 4096);
    }
}

}  // namespace
}  // namespace ferry::train
