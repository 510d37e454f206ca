// Ranks that send their gradients, weights or momentum in few bits.
#include <gtest/gtest.h>

#include <array>
#include <bit>
#include <cmath>
#include <functional>
#include <optional>
#include <string>

#include "checkpoint/steps.h"
#include "cost/simulator.h"
#include "cost/traffic.h"
#include "tests/contract/train_ranks_fixture.h"
#include "tests/support/tiny_run.h"
#include "train/prediction/predictor.h"
#include "train/setup/from_config.h"
#include "train/state/saving.h"

namespace ferry::train::of_ranks {
namespace {

// What the codec changes is within half a step of it, a rank, and some of it.
TEST_F(Ranks, WhoseGradientsAreCodedAreCloseToThoseThatRound) {
    Config config = this->config();
    config.steps = 1;
    config.clip_norm = 0;
    const Outcome plain = run(config, ranks());
    for (const CodecKind kind : {CodecKind::int8, CodecKind::int4}) {
        config.zero.compress = {.gradients = kind, .block = 64};
        const Outcome coded = run(config, ranks());
        EXPECT_EQ(coded.reports[0].loss, plain.reports[0].loss);  // of the same weights
        double difference = 0, squares = 0;
        for (const auto& [name, bits] : plain.gradients) {
            for (size_t i = 0; i < bits.size(); ++i) {
                const double value = std::bit_cast<float>(bits[i]);
                const double off = std::bit_cast<float>(coded.gradients.at(name)[i]) - value;
                squares += value * value;
                difference += off * off;
            }
        }
        const double off = std::sqrt(difference / squares);
        const double levels = kind == CodecKind::int8 ? 127 : 7;
        EXPECT_GT(off, 0.05 / levels) << "nothing was coded";
        EXPECT_LT(off, 1.5 / levels);
        EXPECT_NEAR(coded.reports[0].gradient_norm, plain.reports[0].gradient_norm,
                    plain.reports[0].gradient_norm / levels);
    }
}

TEST_F(Ranks, WhoseWeightsAreCodedGiveTheSameBitsOnEveryTier) {
    Config config = this->config();
    config.zero.stage = 3;
    config.batch.micro_batches = 4;
    for (const DType precision : {DType::f32, DType::bf16, DType::f16}) {
        for (const bool tied : {false, true}) {
            SCOPED_TRACE(testing::Message() << name_of(precision) << ", tied " << tied);
            config.precision = precision;
            config.model.tie_embeddings = tied;
            config.zero.compress = {};
            const Outcome plain = run(config, 2);
            config.zero.compress = {
                .gradients = CodecKind::int4, .weights = CodecKind::int8, .block = 64};
            const Outcome first = run(config, 2);
            EXPECT_NE(first.reports[0].loss, plain.reports[0].loss) << "nothing was coded";
            EXPECT_NEAR(first.reports[0].loss, plain.reports[0].loss, 0.02);
            EXPECT_NEAR(first.after.loss, plain.after.loss, 0.1);
            expect_equal(run(tight(config, 2), 2), first);
            Config on_device = config;
            on_device.swap.state_on_device = 1;
            expect_equal(run(on_device, 2), first);
            Config in_groups = config;
            in_groups.swap.groups = 2;
            expect_equal(run(in_groups, 2), first);
        }
    }
}

// Four ranks, of which two share a host.
class OfHosts : public Ranks {
protected:
    int ranks() const override { return 4; }
    Config config() const {
        Config config = Ranks::config();
        config.batch.micro_batches = 2 * ranks();
        config.steps = 3;
        config.zero.ranks_per_host = 2;
        config.zero.compress = {.gradients = CodecKind::int8, .block = 64};
        return config;
    }
};

class OfHostsOfEachKind : public OfHosts, public testing::WithParamInterface<int> {};

TEST_P(OfHostsOfEachKind, CombineTheirGradientsWithTheSameBitsAtEveryStageAndOnEveryTier) {
    Config config = this->config();
    const std::array<std::function<void()>, 4> kinds{
        [] {},
        [&] {  // several chunks a shard, the last one smaller, and frozen tensors
            cut_into_chunks(config);
            config.precision = DType::bf16;
            config.zero.compress = {.gradients = CodecKind::int4, .block = 256};
            config.freeze = {"*.q_proj.weight", "*layers.1.*norm*"};
        },
        [&] {
            config.zero.compress = {.gradients = CodecKind::int4, .block = 128};
            config.precision = DType::f16;
            config.model.tie_embeddings = true;
            config.parallel.sequence = 2;
            config.batch.micro_batches /= 2;
        },
        [&] { config.optimizer = muon(); }};
    kinds[static_cast<size_t>(GetParam())]();
    expect_stages_equal(config, ranks());
}

INSTANTIATE_TEST_SUITE_P(kinds, OfHostsOfEachKind, testing::Range(0, 4));

// It is where gradients are rounded, whoever is near.
TEST_F(OfHosts, CombineWithinTheRoundingOfTheirCodes) {
    Config config = this->config();
    config.steps = 1;
    config.clip_norm = 0;
    const auto with = [&](CodecKind kind, int ranks_per_host) {
        config.zero.compress.gradients = kind;
        config.zero.ranks_per_host = ranks_per_host;
        return run(config, ranks());
    };
    const Outcome plain = with(CodecKind::none, 1);
    expect_equal(with(CodecKind::none, 2), plain);  // what is not coded has one level
    for (const CodecKind kind : {CodecKind::int8, CodecKind::int4}) {
        const Outcome one = with(kind, 1), two = with(kind, 2);
        expect_equal(with(kind, 4), one);  // all of them on one host
        EXPECT_NE(two.gradients, one.gradients) << "nothing was combined";
        double difference = 0, squares = 0;
        for (const auto& [name, bits] : plain.gradients) {
            for (size_t i = 0; i < bits.size(); ++i) {
                const double value = std::bit_cast<float>(bits[i]);
                const double off = std::bit_cast<float>(two.gradients.at(name)[i]) - value;
                squares += value * value;
                difference += off * off;
            }
        }
        const double levels = kind == CodecKind::int8 ? 127 : 7;
        EXPECT_LT(std::sqrt(difference / squares), 2.5 / levels);
    }
}

// A second copy inside each host changes no bit, whatever is coded, and wherever it lies.
TEST_F(OfHosts, KeepSecondShardsWithTheBitsOfThoseThatDoNot) {
    Config config = this->config();
    config.zero.stage = 3;
    for (const CodecKind weights : {CodecKind::none, CodecKind::int8}) {
        for (const bool tied : {false, true}) {
            SCOPED_TRACE(testing::Message() << static_cast<int>(weights) << ", tied " << tied);
            config.zero.second_shard = SecondShard::none;
            config.zero.compress.weights = weights;
            config.model.tie_embeddings = tied;
            config.precision = tied ? DType::f32 : DType::bf16;
            const Outcome first = run(config, ranks());
            config.zero.second_shard = SecondShard::host;
            expect_equal(run(config, ranks()), first);
            expect_equal(run(tight(config, ranks()), ranks()), first);
            Config in_groups = config;
            in_groups.swap.groups = 2;
            expect_equal(run(in_groups, ranks()), first);
            in_groups.swap.state_on_device = 1;
            expect_equal(run(in_groups, ranks()), first);
            if (HasFailure()) return;
        }
    }
}

// And 1-bit Adam's momentum has no levels.
TEST_F(OfHosts, KeepSecondShardsBesideMomentumAsSigns) {
    Config config = this->config();
    config.zero.stage = 3;
    config.steps = 4;
    config.optimizer.method = optim::Method::onebit_adam;
    config.optimizer.freeze_step = 2;
    config.zero.compress = {.gradients = CodecKind::none, .block = 64};
    config.zero.ranks_per_host = 1;
    const Outcome first = run(config, ranks());
    config.zero.ranks_per_host = 2;
    config.zero.second_shard = SecondShard::host;
    expect_equal(run(config, ranks()), first);
}

TEST_F(OfHosts, MoveInAStepWhatTheBoundCounts) {
    Config config = this->config();
    config.zero.stage = 3;
    config.zero.second_shard = SecondShard::host;
    for (const CodecKind weights : {CodecKind::none, CodecKind::int8}) {
        config.zero.compress.weights = weights;
        const auto predictor = Predictor::make(config, {.ranks = 4, .on_a_host = 2});
        const planner::Plan plan = predictor->plan(request_of(config));
        cost::CommTraffic moved;
        const swap::Schedule step = record_step(plan, Previous::not_speculative, false);
        for (const swap::Task& task : step.tasks)
            if (task.lane == swap::Lane::comm)
                moved.of(cost::among(task)) += static_cast<double>(task.bytes);
        const cost::CommTraffic least = cost::comm_traffic(
            plan.layers, plan.partition, plan.compute, plan.wire, Exchanged::gradients);
        EXPECT_EQ(moved.among_all, least.among_all);
        EXPECT_EQ(moved.in_host, least.in_host);
        EXPECT_EQ(moved.across_hosts, least.across_hosts);
        EXPECT_GT(moved.in_host, moved.across_hosts);
        // A link that is slow sets the bound, and the step is no faster.
        cost::Measurements measurements = predictor->assumed(plan);
        measurements.in_host = {1e9, 0};
        measurements.across_hosts = {1e3, 0};
        measurements.comm_bytes_per_s = 2e3;
        const Prediction slow = predictor->predict(request_of(config), plan, measurements);
        EXPECT_EQ(slow.bound_link, cost::Link::comm);
        EXPECT_NEAR(slow.bound_seconds, least.among_all / 2e3 + least.across_hosts / 1e3,
                    1e-6 * slow.bound_seconds);
        EXPECT_GE(slow.timeline.step_seconds, slow.bound_seconds);
    }
}

// Two updates are exact; the others are of momentum as signs.
class OfOnebitAdam : public Ranks, public testing::WithParamInterface<int> {
protected:
    int ranks() const override { return comm::ranks_launched() > 0 ? comm::ranks_launched() : 3; }
    Config config() const {
        Config config = Ranks::config();
        config.batch.micro_batches = 2 * ranks();
        config.optimizer.method = optim::Method::onebit_adam;
        config.optimizer.freeze_step = 2;
        config.zero.compress.block = 64;
        config.steps = 6;
        return config;
    }
};

TEST_P(OfOnebitAdam, EveryKindOfRunGivesTheSameBitsAtEveryStageAndOnEveryTier) {
    Config config = this->config();
    const std::array<std::function<void()>, 5> kinds{
        [] {},
        [&] {
            cut_into_chunks(config);
            config.precision = DType::bf16;
        },
        [&] {
            config.precision = DType::f16;
            config.model.tie_embeddings = true;
        },
        [&] {
            config.freeze = {"*.q_proj.weight", "*embed_tokens*", "*layers.1.*norm*"};
            config.optimizer.weight_decay = 0.1;
        },
        [&] {
            config.precision = DType::bf16;
            config.optimizer.master = MasterFormat::split;
            config.zero.compress.block = 2048;
        }};
    kinds[static_cast<size_t>(GetParam())]();
    expect_stages_equal(config, ranks());
}

INSTANTIATE_TEST_SUITE_P(kinds, OfOnebitAdam, testing::Range(0, 5));

// The second moment changes at updates 1, 2, 3, 5 and 7; the others are of momentum as signs.
class OfZerooneAdam : public Ranks, public testing::WithParamInterface<int> {
protected:
    int ranks() const override { return comm::ranks_launched() > 0 ? comm::ranks_launched() : 3; }
    Config config() const {
        Config config = Ranks::config();
        config.batch.micro_batches = 2 * ranks();
        config.optimizer.method = optim::Method::zeroone_adam;
        config.optimizer.var_freeze_step = 7;
        config.optimizer.var_update_scaler = 2;
        config.zero.compress.block = 64;
        config.steps = 9;
        return config;
    }
};

TEST_P(OfZerooneAdam, EveryKindOfRunGivesTheSameBitsAtEveryStageAndOnEveryTier) {
    Config config = this->config();
    const std::array<std::function<void()>, 3> kinds{
        [] {},
        [&] {
            cut_into_chunks(config);
            config.precision = DType::bf16;
            config.optimizer.master = MasterFormat::split;
        },
        [&] {
            config.freeze = {"*.q_proj.weight", "*embed_tokens*", "*layers.1.*norm*"};
            config.optimizer.weight_decay = 0.1;
            config.precision = DType::f16;
        }};
    kinds[static_cast<size_t>(GetParam())]();
    expect_stages_equal(config, ranks());
}

// After update 3 exchanges are 1, 1, 2 and 3 updates apart; the run ends between two.
TEST_P(OfZerooneAdam, LocalStepsGiveTheSameBitsOnEveryTier) {
    Config config = this->config();
    config.zero.stage = 0;
    config.optimizer.var_freeze_step = 3;
    config.optimizer.local_step_scaler = 2;
    config.optimizer.local_step_clipper = 3;
    config.steps = 12;
    const std::array<std::function<void()>, 3> kinds{
        [&] { config.optimizer.weight_decay = 0.1; },
        [&] {
            config.model.hidden = 64;
            config.model.intermediate = 160;
            config.model.head_dim = 32;
            config.precision = DType::bf16;
        },
        [&] {
            config.freeze = {"*.q_proj.weight", "*embed_tokens*", "*layers.1.*norm*"};
            config.precision = DType::f16;
        }};
    kinds[static_cast<size_t>(GetParam())]();
    const Outcome first = run(config, ranks());
    Config tight = this->tight(config, ranks());
    if (config.device == DeviceKind::cpu) tight.budgets.host_bytes = ranks() * 1200 * kKiB;
    expect_equal(run(tight, ranks()), first);
    config.swap.chunk_elements = 8192;
    expect_equal(run(config, ranks()), first);
    config.optimizer.local_step_clipper = 1;
    EXPECT_NE(run(config, ranks()).hash, first.hash);
}

INSTANTIATE_TEST_SUITE_P(kinds, OfZerooneAdam, testing::Range(0, 3));

// What goes on from a checkpoint has the bits of the run that was never stopped: from before the
// first update that sends signs, from the last one that does not, and from those after it, by
// another placement.
class SavedMomentum : public Ranks, public testing::WithParamInterface<int> {
protected:
    int ranks() const override { return comm::ranks_launched() > 0 ? comm::ranks_launched() : 2; }

    // By the steps of `with`, from a checkpoint or from the start; the hash of the state then.
    uint64_t run_from(const std::string& checkpoint, const Config& config,
                      const std::function<void(Engine&, bool first)>& with) const {
        uint64_t hash = 0;
        comm::on_run_ranks(ranks(),
                           [&](std::unique_ptr<comm::Communicator> others, Executor& executor) {
                               const bool first = others->rank() == 0 || comm::ranks_launched() > 0;
                               const bool saves = others->rank() == 0;
                               Runtime runtime = with_ranks(std::move(others), executor);
                               runtime.checkpoint = checkpoint;
                               const auto engine = Engine::make(config, std::move(runtime));
                               with(*engine, saves);
                               const uint64_t mine = engine->state_hash();
                               if (first) hash = mine;
                           });
        return hash;
    }
    static Runtime with_ranks(std::unique_ptr<comm::Communicator> others, Executor& executor) {
        return train::with({.executor = &executor}, {.ranks = std::move(others)});
    }

    const TemporaryDirectory saved_{};
};

TEST_P(SavedMomentum, GoesOnWithTheSameBitsAcrossTheFirstExchangeOfIt) {
    Config config = this->config();
    config.batch.micro_batches = 2 * ranks();
    config.precision = DType::bf16;
    config.zero.compress.block = 64;
    config.steps = 8;
    const bool alone = GetParam() == 2;
    config.zero.stage = GetParam() == 1 ? 3 : 0;
    config.optimizer.method = optim::Method::onebit_adam;
    config.optimizer.freeze_step = 3;
    if (alone) {
        config.optimizer = {.method = optim::Method::zeroone_adam,
                            .lr = 3e-3,
                            .var_freeze_step = 3,
                            .var_update_scaler = 2,
                            .local_step_scaler = 1,
                            .local_step_clipper = 3};
    }
    const std::string directory = comm::as_first_rank_says(saved_.path());
    const uint64_t whole = run_from("", config, [&](Engine& engine, bool saves) {
        std::optional<checkpoint::Steps> steps;
        if (saves) steps.emplace(directory);
        while (engine.last_step() < config.steps) {
            engine.step();
            const auto failed = Inside(engine).save({.directory = saves ? &*steps : nullptr});
            ASSERT_FALSE(failed) << failed->what();
        }
    });
    const auto go_on = [&](Engine& engine, bool) {
        while (engine.last_step() < config.steps) engine.step();
    };
    Config tight = this->tight(config, ranks());
    if (config.device == DeviceKind::cpu) tight.budgets.host_bytes = ranks() * 1200 * kKiB;
    EXPECT_EQ(run_from("", tight, go_on), whole);
    for (const int64_t step : {2, 3, 4, 6}) {
        const std::string from = directory + "/" + checkpoint::name_of_step(step);
        EXPECT_EQ(run_from(from, config, go_on), whole) << "from step " << step;
        EXPECT_EQ(run_from(from, tight, go_on), whole) << "from step " << step;
    }
}

INSTANTIATE_TEST_SUITE_P(kinds, SavedMomentum, testing::Range(0, 3));

// Between two exchanges each rank trains weights of its own, and still towards a lower loss.
TEST_F(Ranks, OfZerooneAdamLearnAlone) {
    Config config = this->config();
    config.zero.stage = 0;
    config.optimizer = {.method = optim::Method::zeroone_adam,
                        .lr = 3e-3,
                        .var_freeze_step = 8,
                        .var_update_scaler = 8,
                        .local_step_scaler = 1,
                        .local_step_clipper = 4};
    config.clip_norm = 0;
    config.steps = 40;
    const Outcome local = run(config, 2);
    config.optimizer = {.lr = 3e-3};
    const Outcome exact = run(config, 2);
    for (size_t step = 0; step < 9; ++step)
        EXPECT_EQ(local.reports[step].loss, exact.reports[step].loss) << step;
    const double start = exact.reports.front().loss, end = exact.reports.back().loss;
    EXPECT_LT(local.reports.back().loss, start - 0.7 * (start - end));
}

TEST_F(Ranks, OfOnebitAdamAreExactUntilTheSecondMomentStays) {
    Config config = this->config();
    config.steps = 4;
    config.clip_norm = 0;
    const Outcome exact = run(config, 2);
    config.optimizer.method = optim::Method::onebit_adam;
    config.optimizer.freeze_step = 2;
    const Outcome onebit = run(config, 2);
    for (size_t step = 0; step < 3; ++step)  // the third is of the weights after two updates
        EXPECT_EQ(onebit.reports[step].loss, exact.reports[step].loss);
    EXPECT_NE(onebit.reports[3].loss, exact.reports[3].loss) << "nothing was coded";
    EXPECT_NEAR(onebit.reports[3].loss, exact.reports[3].loss, 0.1);
    // Of ranks that have other tokens: no less than that of the sum, and of its size.
    EXPECT_GE(onebit.reports[2].gradient_norm, 0.999 * exact.reports[2].gradient_norm);
    EXPECT_LT(onebit.reports[2].gradient_norm, 2 * exact.reports[2].gradient_norm);
}

}  // namespace
}  // namespace ferry::train::of_ranks
