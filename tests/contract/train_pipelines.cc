// Pipelines of ranks: what is planned of them before they run, and checkpoints that go on with
// other numbers of stages and ranks.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <spdlog/fmt/fmt.h>

#include <bit>
#include <filesystem>
#include <functional>
#include <map>

#include "checkpoint/saved.h"
#include "checkpoint/steps.h"
#include "cost/traffic.h"
#include "tests/support/quick.h"
#include "tests/support/run_ranks.h"
#include "tests/support/temporary_directory.h"
#include "tests/support/tiny_run.h"
#include "train/inside.h"
#include "train/prediction/model_on_device.h"
#include "train/prediction/predictor.h"
#include "train/prediction/simulated_stages.h"
#include "train/setup/from_config.h"
#include "train/state/saving.h"

namespace ferry::train {
namespace {

// So many ranks, in so many stages, of which so many share tensors.
struct Cut {
    int ranks = 1, stages = 1, tensor = 1;
    PipelineSchedule schedule = PipelineSchedule::one_f_one_b;
    int virtual_stages = 1;
    int of_a_stage() const { return ranks / stages; }
    friend void PrintTo(const Cut& cut, std::ostream* out) {
        *out << cut.ranks << "By" << cut.stages << "By" << cut.tensor;
    }
};

Config staged(Config config, const Cut& cut) {
    config.parallel.pipeline = cut.stages;
    config.parallel.tensor = cut.tensor;
    if (cut.schedule == PipelineSchedule::one_f_one_b) return config;
    config.parallel.schedule = cut.schedule;
    config.parallel.virtual_stages = cut.virtual_stages;
    return config;
}

// `with` is done with the engine of each rank.
using With = std::function<void(Engine&, int rank)>;
void on_ranks(const Config& config, const Cut& cut, const std::string& checkpoint,
              const With& with) {
    const auto go = [&](Runtime runtime, int rank) {
        runtime.checkpoint = checkpoint;
        const auto engine = Engine::make(staged(config, cut), std::move(runtime));
        with(*engine, rank);
    };
    if (cut.ranks == 1) {
        const auto executor = make_thread_executor();
        return go({.executor = executor.get()}, 0);
    }
    comm::on_run_ranks(
        cut.ranks, [&](std::unique_ptr<comm::Communicator> others, Executor& executor) {
            const int rank = others->rank();
            go(train::with({.executor = &executor}, {.ranks = std::move(others)}), rank);
        });
}

// ---------------------------------------------------------------- checkpoints

struct Kind {
    const char* name;
    std::function<void(Config&)> set;
};
const std::array kKinds{
    Kind{"TiedInFp32", [](Config& config) { config.model.tie_embeddings = true; }},
    Kind{"SplitMasterWithBf16Moments",
         [](Config& config) {
             config.precision = DType::bf16;
             config.optimizer.master = MasterFormat::split;
             config.optimizer.moments = MomentType::bf16;
         }},
    Kind{"TiedHalfWithFrozenLayers",
         [](Config& config) {
             config.precision = DType::f16;
             config.model.tie_embeddings = true;
             config.freeze = {"*layers.1.*", "*layers.2.*norm*"};
         }},
    Kind{"FrozenTable",
         [](Config& config) {
             config.precision = DType::bf16;
             config.model.tie_embeddings = true;
             config.freeze = {"*embed_tokens*"};
         }},
    Kind{"Int8Moments", [](Config& config) {
             config = with_coded_moments(config);
             config.precision = DType::bf16;
         }}};

class Resumed : public testing::TestWithParam<size_t> {
protected:
    void SetUp() override {
        if (comm::ranks_launched() > 0) GTEST_SKIP() << "for threads of one process";
    }

    Config config() const {
        Config config = tiny_config(data_);
        kKinds[GetParam()].set(config);
        config.model.layers = 4;
        config.batch = {.sequence = 8, .micro_batch = 1, .micro_batches = 4};
        config.clip_norm = 0;  // its norm would be added in another order
        config.zero.stage = 1;
        config.steps = 4;
        return config;
    }
    Config on_nvme() const {
        Config config = this->config();
        config.budgets.nvme = {{.path = storage_.path(), .size_bytes = 64 * kMiB}};
        config.swap.state_on_nvme = 1;
        config.io.direct = false;
        return config;
    }

    using Weights = std::map<std::string, std::vector<uint32_t>>;
    static Weights weights_of(Engine& engine) {
        Weights weights;
        const auto& layers = Inside(engine).layers();
        for (size_t l = 0; l < layers.size(); ++l)
            for (const model::Tensor& tensor : layers[l].tensors)
                Inside(engine).read_tensor(
                    static_cast<int64_t>(l), tensor, [&](std::span<const float> values) {
                        for (const float value : values)
                            weights[tensor.name].push_back(std::bit_cast<uint32_t>(value));
                    });
        return weights;
    }
    // Trains to the last step; saves behind each where there is a directory for it.
    static Weights train(const Config& config, const Cut& cut, const std::string& from,
                         const std::string& directory) {
        Weights weights;
        on_ranks(config, cut, from, [&](Engine& engine, int rank) {
            std::optional<checkpoint::Steps> steps;
            if (rank == 0 && !directory.empty()) steps.emplace(directory);
            while (engine.last_step() < config.steps) {
                engine.step();
                if (directory.empty()) continue;
                const auto failed = Inside(engine).save({.directory = steps ? &*steps : nullptr});
                ASSERT_FALSE(failed) << failed->what();
            }
            Weights mine = weights_of(engine);
            if (rank == 0) weights = std::move(mine);
        });
        return weights;
    }
    static std::string at(const TemporaryDirectory& directory, int64_t step) {
        return std::filesystem::path(directory.path()) / checkpoint::name_of_step(step);
    }
    static void expect_same_arrays(const std::string& mine, const std::string& theirs) {
        const checkpoint::Saved a(mine), b(theirs);
        EXPECT_EQ(a.arrays().size(), b.arrays().size());
        for (const auto& [name, array] : b.arrays()) {
            ASSERT_NE(a.find(name), nullptr) << name;
            EXPECT_EQ(a.find(name)->checksum, array.checksum) << name;
        }
        EXPECT_EQ(a.manifest().training, b.manifest().training);
    }

    const TinyData data_;
    const TemporaryDirectory storage_{"/var/tmp"};
};

// The same number of ranks a stage: what is written has the bytes of a run with all layers on each
// rank, and every run that goes on from it has that one's bits.
TEST_P(Resumed, WithAnotherNumberOfStages) {
    for (const int each : {1, 2}) {
        const TemporaryDirectory of_whole;
        const Cut whole{each, 1};
        const Weights expected = train(config(), whole, "", of_whole.path());
        for (const int stages : {2, 3}) {
            if (is_quick() && each + stages != 4) continue;
            SCOPED_TRACE(testing::Message() << stages << " stages of " << each);
            const Cut cut{each * stages, stages};
            const TemporaryDirectory directory;
            ASSERT_EQ(train(on_nvme(), cut, "", directory.path()), expected);
            for (const int64_t step : {1, 4})
                expect_same_arrays(at(directory, step), at(of_whole, step));
            EXPECT_EQ(train(config(), whole, at(directory, 2), ""), expected);
            EXPECT_EQ(train(config(), cut, at(of_whole, 3), ""), expected);
            EXPECT_EQ(train(on_nvme(), {each * 4, 4}, at(directory, 1), ""), expected);
            EXPECT_EQ(train(config(), cut, at(directory, 4), ""), expected);  // ends at once
            if (HasFailure()) return;
        }
    }
}

// And in another order, with other numbers of virtual stages.
TEST_P(Resumed, WithOtherVirtualStages) {
    using enum PipelineSchedule;
    const TemporaryDirectory of_whole, directory;
    const Cut whole{1, 1}, interleaved_twice{2, 2, 1, interleaved, 2},
        in_turn_twice{2, 2, 1, round_robin, 2};
    const Weights expected = train(config(), whole, "", of_whole.path());
    ASSERT_EQ(train(on_nvme(), interleaved_twice, "", directory.path()), expected);
    for (const int64_t step : {1, 4}) expect_same_arrays(at(directory, step), at(of_whole, step));
    EXPECT_EQ(train(config(), in_turn_twice, at(directory, 2), ""), expected);
    EXPECT_EQ(train(on_nvme(), {2, 2}, at(directory, 1), ""), expected);
    EXPECT_EQ(train(config(), {4, 4, 1, round_robin, 1}, at(directory, 3), ""), expected);
    EXPECT_EQ(train(on_nvme(), in_turn_twice, at(of_whole, 2), ""), expected);
}

// What ranks that share tensors have written; written again by others it has the same bytes.
TEST_P(Resumed, WithSlicesOfTensors) {
    Config config = this->config();
    if (config.optimizer.moments == MomentType::int8) GTEST_SKIP() << "slices keep none";
    config.steps = 1;
    config.model.kv_heads = 2;
    const TemporaryDirectory from_slices;
    const Cut slices{2, 1, 2};
    const Weights expected = train(config, slices, "", from_slices.path());
    for (const Cut& cut : {Cut{1, 1}, Cut{3, 3}, Cut{4, 2, 2}, Cut{8, 2, 2}}) {
        SCOPED_TRACE(testing::PrintToString(cut));
        const TemporaryDirectory again;
        Weights found;
        on_ranks(config, cut, at(from_slices, 1), [&](Engine& engine, int rank) {
            std::optional<checkpoint::Steps> steps;
            if (rank == 0) steps.emplace(again.path());
            ASSERT_FALSE(Inside(engine).save({.directory = steps ? &*steps : nullptr}));
            Weights mine = weights_of(engine);
            if (rank == 0) found = std::move(mine);
        });
        EXPECT_EQ(found, expected);
        expect_same_arrays(at(again, 1), at(from_slices, 1));
        if (HasFailure()) return;
    }
}

// The same ranks a stage, of which two share tensors: as with whole ones.
TEST_P(Resumed, WithAnotherNumberOfStagesThatShareTensors) {
    Config config = this->config(), stored = on_nvme();
    if (config.optimizer.moments == MomentType::int8) GTEST_SKIP() << "slices keep none";
    config.model.kv_heads = stored.model.kv_heads = 2;
    Spread spread(2, static_cast<int>(GetParam()));
    for (const int replicas : {1, 2}) {
        if (!spread.takes()) continue;
        SCOPED_TRACE(testing::Message() << replicas << " replicas");
        const TemporaryDirectory of_whole, directory;
        const Cut whole{2 * replicas, 1, 2}, cut{4 * replicas, 2, 2};
        const Weights expected = train(config, whole, "", of_whole.path());
        ASSERT_EQ(train(stored, cut, "", directory.path()), expected);
        for (const int64_t step : {1, 4})
            expect_same_arrays(at(directory, step), at(of_whole, step));
        EXPECT_EQ(train(config, whole, at(directory, 2), ""), expected);
        config.zero.stage = 3;
        EXPECT_EQ(train(config, cut, at(of_whole, 3), ""), expected);
        config.zero.stage = 1;
        if (HasFailure()) return;
    }
}

INSTANTIATE_TEST_SUITE_P(kinds, Resumed, testing::Range<size_t>(0, kKinds.size()),
                         [](const auto& kind) { return kKinds[kind.param].name; });

// ---------------------------------------------------------------- before they run

class Planned : public testing::Test {
protected:
    void SetUp() override {
        if (comm::ranks_launched() > 0) GTEST_SKIP() << "for threads of one process";
    }
    Config config(bool tied, int64_t layers = 5) const {
        Config config = tiny_config(data_);
        config.model.layers = layers;
        config.model.tie_embeddings = tied;
        config.batch = {.sequence = 8, .micro_batch = 1, .micro_batches = 8};
        config.zero.stage = 1;
        config.steps = 3;
        return config;
    }
    // So many micro-batches that it is predicted by shorter ones.
    Config with_a_long_step() const {
        Config config = this->config(false, 4);
        config.model.hidden = 256;
        config.model.head_dim = 64;
        config.model.intermediate = 768;
        config.batch.micro_batches = 1024;
        config.budgets.device_bytes = config.budgets.host_bytes = kUnlimited;
        return config;
    }
    static double bytes_of_gradients(const planner::Plan& plan) {
        return static_cast<double>(4 * plan.chunks.size() * plan.chunk_elements);
    }
    static std::unique_ptr<Predictor> predictor(const Config& config, const Cut& cut) {
        return Predictor::make(staged(config, cut), {.ranks = cut.ranks, .on_a_host = cut.ranks});
    }

    // A block takes a second forward and three back, of which one are its weights' gradients.
    static void expect_to_wait_as_theory_says(const Config& config, const Cut& cut) {
        const bool splits = config.parallel.schedule == PipelineSchedule::zero_bubble;
        const auto planned = predictor(config, cut);
        const planner::PlanRequest request = request_of(staged(config, cut));
        const planner::Plan plan = planned->plan(request);
        cost::Measurements only = planned->assumed(plan);
        only.copy_bytes_per_s = only.dram_bytes_per_s = only.device_bytes_per_s = 1e18;
        only.comm_bytes_per_s = only.check_bytes_per_s = 1e18;
        only.update_overhead_s = only.comm_overhead_s = 0;
        only.computes_on_host = false;
        only.kernels.saved_s = {};
        for (auto& [kind, seconds] : only.kernels.seconds) {
            const auto op = static_cast<cost::Op>(kind[0]);
            seconds = op == cost::Op::forward || op == cost::Op::weight_gradients ? 1
                      : op == cost::Op::backward                                  ? (splits ? 2 : 3)
                                                                                  : 0;
        }
        const Prediction step = planned->predict(request, plan, only);
        // A block visits a micro-batch forward and back in 4 s.
        const auto visits =
            static_cast<double>(plan.micro_batches * config.model.layers / cut.stages);
        const double expected = 4 * visits / (1 - bubble_of(plan));
        EXPECT_NEAR(step.timeline.step_seconds, expected, 1e-3 * expected);
        for (const StagePrediction& stage : step.stages) {
            EXPECT_NEAR(stage.waits, bubble_of(plan), 1e-3);
            EXPECT_NEAR(stage.compute_seconds, 4 * visits, 1e-3 * expected);
        }
    }

    const TinyData data_;
    const TemporaryDirectory storage_{"/var/tmp"};
};

// To the byte, of every rank: its memory, and what it passes on in a step.
TEST_F(Planned, AsTheyRun) {
    using enum PipelineSchedule;
    Spread spread(3);
    for (const Cut cut :
         {Cut{2, 2}, Cut{4, 2}, Cut{3, 3}, Cut{4, 2, 2}, Cut{8, 2, 2}, Cut{2, 2, 1, interleaved, 2},
          Cut{2, 2, 1, round_robin, 2}, Cut{4, 2, 2, round_robin, 2}}) {
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
TEST_F(Planned, MoveInAStepWhatTheBoundCounts) {
    for (const bool tied : {false, true}) {
        Config config = this->config(tied);
        config.freeze = {"*layers.3.*"};
        for (const int64_t stage : {0, 1, 2}) {
            config.zero.stage = stage;
            const Cut cut{6, 3};
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
TEST_F(Planned, ReadATiedTableOnce) {
    const Cut cut{2, 2};
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
TEST_F(Planned, WaitAsTheorySays) {
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
TEST_F(Planned, WaitInSeveralVirtualStagesAsTheorySays) {
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
TEST_F(Planned, ShortStepsAreAsFarAsTheySayFromTheWholeStep) {
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
                        const Cut cut{2 * stages, stages, 1, schedule, several ? 2 : 1};
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
TEST_F(Planned, ShortStepsAreNoShorterThanTheKernels) {
    const Config config = with_a_long_step();
    const Cut cut{4, 2, 1, PipelineSchedule::round_robin, 2};
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
TEST_F(Planned, NoLongStepIsShorterOverASlowerNetwork) {
    const Config config = with_a_long_step();
    const Cut cut{4, 2, 1, PipelineSchedule::round_robin, 1};
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
TEST_F(Planned, TakeAsLongAsWhatTheyPass) {
    const Config config = this->config(false, 4);
    const Cut cut{2, 2};
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
TEST_F(Planned, WaitTheRestOfTheStepThatIsPredicted) {
    const Config config = this->config(false, 4);
    const Cut cut{4, 4};
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

// ---------------------------------------------------------------- which schedule

// Where nothing but the blocks' kernels takes time, what fills bubbles is faster.
TEST_F(Planned, ChooseTheScheduleWithTheShortestStep) {
    Config config = this->config(false, 4);
    config.budgets.device_bytes = kUnlimited;
    const Cut cut{2, 2};
    const auto planned = predictor(config, cut);
    cost::Measurements fast = planned->planned_by();
    fast.copy_bytes_per_s = fast.dram_bytes_per_s = fast.device_bytes_per_s = 1e18;
    fast.comm_bytes_per_s = fast.check_bytes_per_s = 1e18;
    fast.update_overhead_s = fast.comm_overhead_s = 0;
    fast.computes_on_host = false;
    planned->choose_schedule(fast);
    const ScheduleChoice choice = planned->schedules();
    ASSERT_EQ(choice.offers.size(), orders_to_choose(staged(config, cut), 4).size());
    EXPECT_EQ(choice.schedule(), PipelineSchedule::zero_bubble);
    const ScheduleOffer &plain = choice.offers[0], &split = choice.offers[1];
    EXPECT_LT(split.seconds, plain.seconds);
    EXPECT_LT(split.waits, plain.waits);
    EXPECT_GT(split.device_bytes, plain.device_bytes);
    EXPECT_TRUE(planned->plan(request_of(staged(config, cut))).partition.stage.splits_backward);
    const std::string said = text_of(choice);
    EXPECT_THAT(said, testing::StartsWith("zero_bubble, the fastest as simulated: 1f1b "));
    planned->choose_schedule(fast);
    EXPECT_EQ(text_of(planned->schedules()), said);
    // A network that all wait for leaves nothing to fill.
    cost::Measurements slow = fast;
    slow.between_stages = {.bytes_per_s = 10, .overhead_s = 0};
    planned->choose_schedule(slow);
    EXPECT_EQ(planned->schedules().schedule(), PipelineSchedule::one_f_one_b);
    EXPECT_FALSE(planned->plan(request_of(staged(config, cut))).partition.stage.splits_backward);
}

// What the last stage leaves of weights' gradients takes device memory that there is not.
class Tight : public Planned {
protected:
    static bool fits(Config config, PipelineSchedule schedule, int64_t* smallest = nullptr) {
        config.parallel.schedule = schedule;
        try {
            predictor(config, {2, 2})->plans(request_of(staged(config, {2, 2})));
        } catch (const planner::DoesNotFit& refusal) {
            if (smallest) *smallest = refusal.smallest();
            return false;
        }
        return true;
    }
    // As much device memory as both stages need of one group after the other, and no more.
    static Config tightened(Config config) {
        config.swap.chunk_elements = 4096;
        config.budgets.device_bytes = 4096;
        int64_t &bytes = config.budgets.device_bytes, smallest = bytes;
        for (int tries = 0; tries < 100; ++tries) {
            if (fits(config, PipelineSchedule::one_f_one_b, &smallest)) return config;
            bytes = std::max(bytes + 4096, smallest);
        }
        ADD_FAILURE() << "nothing fits";
        return config;
    }
    Config tight() const { return tightened(this->config(false, 4)); }
};

// Weights that stream come again for each group, and not at all where they stay.
TEST_F(Tight, CountsTheWeightsThatStream) {
    const auto streamed = [&](int64_t groups, bool stays) {
        Config config = this->config(false, 4);
        config.swap.groups = groups;
        config.budgets.device_bytes = kUnlimited;
        if (!stays) config = tightened(config);
        return predictor(config, {2, 2})->schedules().offers[0].weight_bytes;
    };
    EXPECT_GT(streamed(2, false), 0);
    EXPECT_GT(streamed(8, false), 2 * streamed(2, false));
    EXPECT_LT(streamed(8, true), streamed(2, false));
}

TEST_F(Tight, WhatDoesNotFitIsNotChosen) {
    const Config config = tight();
    const auto planned = predictor(config, {2, 2});
    const ScheduleChoice& choice = planned->schedules();
    EXPECT_NE(choice.schedule(), PipelineSchedule::zero_bubble);
    ASSERT_FALSE(choice.offers[0].refusal);
    ASSERT_TRUE(choice.offers[1].refusal);
    const std::string said = text_of(choice);
    EXPECT_THAT(said, testing::HasSubstr("; not zero_bubble: "));
    EXPECT_THAT(said, testing::HasSubstr(" of 2)"));
}

struct Chosen {
    bool splits = false;
    int64_t virtual_stages = 1;
    bool is_recorded = false;  // in the numerics record
    std::vector<double> losses{};
    uint64_t hash = 0;
    bool operator==(const Chosen&) const = default;
};
// What a rank of each number did, the same of all. `measurements`: a rank's own; may be null.
Chosen chosen_by(const Config& config, const Cut& cut,
                 const std::function<const cost::Measurements*(int rank)>& measurements = {}) {
    std::vector<Chosen> all(static_cast<size_t>(cut.ranks));
    comm::on_run_ranks(
        cut.ranks, [&](std::unique_ptr<comm::Communicator> others, Executor& executor) {
            const int rank = others->rank();
            Given given{.measurements = measurements ? measurements(rank) : nullptr,
                        .ranks = std::move(others)};
            const auto engine = Engine::make(
                staged(config, cut), train::with({.executor = &executor}, std::move(given)));
            Chosen& mine = all[static_cast<size_t>(rank)];
            const zero::Stage& stage = Inside(*engine).plan().partition.stage;
            mine.splits = stage.splits_backward;
            mine.virtual_stages = stage.virtual_stages();
            mine.is_recorded = engine->numerics_record().find(fmt::format(
                                   " in {} rounds", mine.virtual_stages)) != std::string::npos;
            while (engine->last_step() < config.steps) mine.losses.push_back(engine->step().loss);
            mine.hash = engine->state_hash();
        });
    for (const Chosen& one : all) EXPECT_EQ(one, all.front());
    return all.front();
}

// Every rank the same, and the bits of either; also where each alone would have chosen otherwise.
TEST_F(Tight, RanksChooseAsOne) {
    for (const Cut cut : {Cut{2, 2}, Cut{4, 2}, Cut{4, 4}}) {
        SCOPED_TRACE(testing::PrintToString(cut));
        Config config = this->config(false, 4);
        config.clip_norm = 0;
        std::vector<Chosen> fixed;
        for (const StageOrder& order : orders_to_choose(config, 4))
            fixed.push_back(chosen_by(with_order(config, order), cut));
        EXPECT_EQ(fixed[0].hash, fixed[1].hash);
        EXPECT_EQ(fixed[0].losses, fixed[1].losses);
        cost::Measurements fast = predictor(config, cut)->planned_by(), slow = fast;
        fast.comm_bytes_per_s = 1e18;
        fast.comm_overhead_s = 0;
        slow.between_stages = {.bytes_per_s = 10, .overhead_s = 0};
        const auto ranks = [&](bool first_is_slow) {
            return [&, first_is_slow](int rank) {
                return (rank == 0) == first_is_slow ? &slow : &fast;
            };
        };
        const Chosen by_slow = chosen_by(config, cut, ranks(true));
        EXPECT_EQ(by_slow, fixed[0]);
        const Chosen by_fast = chosen_by(config, cut, ranks(false));
        EXPECT_EQ(by_fast.hash, fixed[0].hash);
        EXPECT_EQ(by_fast.losses, fixed[0].losses);
    }
}

// Where the number of virtual stages is ferry's choice too, a run takes what its plan does, the
// record names it, and no bit differs where nothing is clipped.
TEST_F(Tight, RanksChooseVirtualStagesAsPlansDo) {
    const Cut cut{2, 2};
    Config config = this->config(false, 4);
    config.clip_norm = 0;
    const Chosen plain = chosen_by(with_order(config, {PipelineSchedule::one_f_one_b}), cut);
    EXPECT_FALSE(plain.is_recorded);
    config.parallel.virtual_stages = std::nullopt;
    for (const PipelineSchedule schedule :
         {PipelineSchedule::automatic, PipelineSchedule::interleaved,
          PipelineSchedule::round_robin}) {
        SCOPED_TRACE(std::string(name_of(schedule)));
        config.parallel.schedule = schedule;
        const auto planned = predictor(config, cut);
        const std::vector<StageOrder> orders = orders_to_choose(staged(config, cut), 4);
        ASSERT_EQ(planned->schedules().offers.size(), orders.size());
        const StageOrder& order = planned->schedules().order();
        const Chosen chosen = chosen_by(config, cut);
        EXPECT_EQ(chosen.virtual_stages, order.virtual_stages);
        EXPECT_EQ(chosen.is_recorded, order.virtual_stages > 1);
        EXPECT_EQ(chosen.splits, order.schedule == PipelineSchedule::zero_bubble);
        EXPECT_EQ(chosen.losses, plain.losses);
        EXPECT_EQ(chosen, chosen_by(with_order(config, order), cut));
        EXPECT_TRUE(schedule != PipelineSchedule::interleaved || chosen.virtual_stages == 2);
    }
}

// One stage alone has no room; and where none has for either, all ranks say which.
TEST_F(Tight, RanksWithoutRoomAreHeard) {
    Config config = tight();
    config.clip_norm = 0;
    const Cut cut{2, 2};
    const Chosen fixed = chosen_by(with_order(config, {PipelineSchedule::one_f_one_b}), cut);
    EXPECT_EQ(chosen_by(config, cut), fixed);
    config.budgets.device_bytes = 4096;
    comm::on_run_ranks(
        cut.ranks, [&](std::unique_ptr<comm::Communicator> others, Executor& executor) {
            try {
                Engine::make(staged(config, cut),
                             train::with({.executor = &executor}, {.ranks = std::move(others)}));
                ADD_FAILURE() << "it fits";
            } catch (const Error& error) {
                EXPECT_EQ(error.trouble(), Trouble::does_not_fit);
                EXPECT_THAT(error.what(), testing::HasSubstr("stage 0 of 2"));
            }
        });
}

// A run predicts the step of all stages, as the plan does.
TEST_F(Planned, ARunPredictsAllStages) {
    for (const Cut cut : {Cut{2, 2}, Cut{4, 2}}) {
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

TEST_F(Planned, WhereAStageDoesNotFitItIsNamed) {
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
