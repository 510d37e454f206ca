// Whole runs of several ranks: the stage and the tiers change no bit, the number of ranks no more
// than the rounding of their gradients.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <functional>

#include "tests/contract/train_ranks_fixture.h"
#include "tests/support/nccl_unique_id.h"
#include "tests/support/run_ranks.h"
#include "tests/support/tiny_run.h"
#include "tests/support/write_tokens.h"

namespace ferry::train::of_ranks {
namespace {

class EachNumber : public Ranks, public testing::WithParamInterface<int> {
    int ranks() const override { return GetParam(); }
};

TEST_P(EachNumber, OfRanksGivesTheSameBitsAtEveryStageAndOnEveryTier) {
    expect_stages_equal(config(), GetParam());
}

// Their gradients are rounded to fp32 once more, and added in another order.
TEST_P(EachNumber, OfRanksFollowsTheRunOfOne) {
    const Config config = this->config();
    const Outcome several = run(config, GetParam());
    const Outcome one = alone(config);
    EXPECT_NEAR(several.before.loss, one.before.loss, 1e-14);
    EXPECT_EQ(several.before.targets, one.before.targets);
    EXPECT_NEAR(several.reports[0].loss, one.reports[0].loss, 1e-14);
    int clipped = 0;
    for (size_t i = 0; i < one.reports.size(); ++i) {
        EXPECT_EQ(several.reports[i].targets, one.reports[i].targets);
        EXPECT_EQ(several.reports[i].tokens, one.reports[i].tokens);
        EXPECT_NEAR(several.reports[i].loss, one.reports[i].loss, 2e-6 * one.reports[i].loss);
        EXPECT_NEAR(several.reports[i].gradient_norm, one.reports[i].gradient_norm,
                    1e-5 * one.reports[i].gradient_norm);
        clipped += one.reports[i].clip_factor < 1;
    }
    EXPECT_GT(clipped, 0);
    EXPECT_NEAR(several.after.loss, one.after.loss, 2e-6 * one.after.loss);
}

// Each rank has whole matrices, and so there is nothing but that rounding between them too; what it
// is to a singular value near zero is more to its direction.
TEST_P(EachNumber, OfRanksWithWholeMatricesFollowsTheRunOfOne) {
    Config config = this->config();
    config.optimizer = muon();
    const Outcome several = run(config, GetParam());
    const Outcome one = alone(config);
    EXPECT_NEAR(several.reports[0].loss, one.reports[0].loss, 1e-14);
    for (size_t i = 0; i < one.reports.size(); ++i)
        EXPECT_NEAR(several.reports[i].loss, one.reports[i].loss, 1e-4 * one.reports[i].loss);
    EXPECT_NEAR(several.after.loss, one.after.loss, 1e-4 * one.after.loss);
    EXPECT_NE(one.after.loss, one.before.loss);
}

TEST_P(EachNumber, OfRanksWithWholeMatricesGivesTheSameBitsAtEveryStage) {
    Config config = this->config();
    config.optimizer = muon();
    expect_stages_equal(config, GetParam());
}

INSTANTIATE_TEST_SUITE_P(numbers, EachNumber, testing::Values(1, 2, 3, 4),
                         [](const auto& ranks) { return std::to_string(ranks.param); });

class EachKind : public Ranks, public testing::WithParamInterface<int> {
protected:
    int ranks() const override { return comm::ranks_launched() > 0 ? comm::ranks_launched() : 3; }
};

// Every kind of run, on three ranks: their shards end inside of tensors.
TEST_P(EachKind, OfModelAndStateGivesTheSameBitsAtEveryStage) {
    Config config = this->config();
    config.batch.micro_batches = 2 * ranks();
    config.steps = 3;
    const std::array<std::function<void()>, 13> kinds{
        [&] { cut_into_chunks(config); },
        [&] { config.precision = DType::bf16; },
        [&] { config.precision = DType::f16; },
        [&] { config.model.tie_embeddings = true; },
        [&] {
            config.freeze = {"*.q_proj.weight", "*embed_tokens*", "*layers.1.*norm*"};
        },
        [&] {
            config.precision = DType::bf16;
            config.optimizer.moments = MomentType::bf16;
            config.optimizer.master = MasterFormat::split;
        },
        [&] {
            config.precision = DType::bf16;
            config.numerics.wire = DType::f32;
            config.clip_norm = 0;
            config.optimizer.method = optim::Method::lion;
        },
        [&] { config = with_coded_moments(config); },
        [&] { config.optimizer = muon(); },
        [&] {  // matrices of two formats, some frozen, the last group of a block with fewer
            config = with_coded_moments(config);
            config.optimizer = muon();
            config.optimizer.moments = MomentType::int8;
            config.optimizer.fp32_moments = {"*k_proj*", "*embed*"};
            config.precision = DType::bf16;
            config.freeze = {"*.0.*q_proj.weight"};
        },
        [&] { config.zero.compress = {.gradients = CodecKind::int8, .block = 64}; },
        [&] {  // with frozen tensors, and several chunks a shard
            config.zero.compress = {.gradients = CodecKind::int4, .block = 2048};
            config.precision = DType::bf16;
            config.model.hidden = 64;
            config.swap.chunk_elements = 8192;
            config.freeze = {"*.q_proj.weight", "*layers.1.*norm*"};
        },
        [&] {
            config.zero.compress = {.gradients = CodecKind::int4, .block = 128};
            config.precision = DType::f16;
            config.model.tie_embeddings = true;
        }};
    kinds[static_cast<size_t>(GetParam())]();
    expect_stages_equal(config, ranks());
}

INSTANTIATE_TEST_SUITE_P(kinds, EachKind, testing::Range(0, 13));

TEST_F(Ranks, GiveTheSameBitsWhateverTheySaveForBackward) {
    for (const DType precision : {DType::f32, DType::bf16}) {
        Config config = this->config();
        config.precision = precision;
        config.batch.micro_batches = 4;
        config.swap.save_attention = config.swap.save_mlp = config.swap.save_projections = 0;
        const Outcome none = run(config, 2);
        for (const int64_t blocks : {1, 2}) {
            for (const int64_t stage : {0, 3}) {
                SCOPED_TRACE(testing::Message() << name_of(precision) << ", stage " << stage << ", "
                                                << blocks << " blocks keep it");
                config.zero.stage = stage;
                config.swap.save_attention = config.swap.save_projections = blocks;
                config.swap.save_mlp = 2 - blocks;
                expect_equal(run(config, 2), none);
                expect_equal(run(tight(config, 2), 2), none);
            }
        }
    }
}

TEST_F(Ranks, GiveTheSameBitsAgain) { expect_equal(run(config(), 2), run(config(), 2)); }

// Sequences of one token, some of them no target: where a step has one target, the gradients of one
// rank alone overflow on the way to fp16, and the other's are zero.
TEST_F(Ranks, AllSkipWhereOneOverflows) {
    Config config = this->config();
    const std::string own = directory_ / "masked.bin";
    config.data.held_back = 0;
    std::vector<uint32_t> tokens(1500);
    std::vector<uint8_t> mask(tokens.size());
    for (size_t i = 0; i < tokens.size(); ++i) {
        tokens[i] = static_cast<uint32_t>((i * i / 7 + i) % 31);
        mask[i] = i * i % 5 < 2;
    }
    write_tokens(own, tokens, 32, mask);
    config.data.tokens = comm::as_first_rank_says(own);
    config.precision = DType::f16;
    config.batch = {.sequence = 1, .micro_batch = 1, .micro_batches = 2};
    config.evaluate.micro_batches = 0;
    config.model.norm_eps = 1e-30;
    config.clip_norm = 1e6;
    config.steps = 20;
    const Outcome two = run(config, 2);
    int64_t of_one = 0, of_none = 0, good = 0;
    for (const StepReport& report : two.reports) {
        of_one += report.targets == 1 && report.skipped;
        of_none += report.targets == 0;
        good += !report.skipped;
    }
    EXPECT_GT(of_one, 0);
    EXPECT_GT(of_none, 0);
    EXPECT_GT(good, 0);
    EXPECT_LT(two.reports.back().loss_scale, two.reports.front().loss_scale);
    for (const int64_t stage : {0, 1, 3}) {
        config.zero.stage = stage;
        Config on_device = config;
        on_device.swap.state_on_device = 0.6;
        expect_equal(run(on_device, 2), two);
        expect_equal(run(tight(config, 2), 2), two);
    }
}

#ifdef FERRY_NCCL
// As a runtime that has no MPI brings them.
TEST_F(Ranks, MetByAnIdentityGiveTheSameBits) {
    const Config config = this->config();
    if (config.device != DeviceKind::cuda) GTEST_SKIP() << "NCCL moves a GPU's memory";
    const auto by_identity = [](Runtime& runtime, std::unique_ptr<comm::Communicator> others) {
        runtime.gpu = comm::gpu_of_rank(*others, *runtime.executor);
        const auto met = comm::with_unique_id(*others, *runtime.executor);
        runtime.nccl = {met.unique_id, met.rank, met.size};
    };
    expect_equal(run(config, 2, by_identity), run(config, 2));
    expect_equal(run(tight(config, 2), 2, by_identity), run(config, 2));
}
#endif

TEST_F(Ranks, MetByAnIdentityNeedAGpu) {
    const auto executor = make_thread_executor();
    const auto refusal = [&](const Config& config, Runtime runtime,
                             NcclRanks ranks = {.size = 2}) -> std::string {
        runtime.executor = executor.get();
        runtime.nccl = ranks;
        try {
            Engine::make(config, std::move(runtime));
        } catch (const Error& error) {
            EXPECT_EQ(error.trouble(), Trouble::usage);
            return error.what();
        }
        return "";
    };
    Config config = this->config();
    config.device = DeviceKind::cpu;
    EXPECT_THAT(refusal(config, {.gpu = 0}), testing::HasSubstr("device is \"cpu\""));
    config.device = DeviceKind::cuda;
    EXPECT_THAT(refusal(config, {}), testing::HasSubstr("Runtime::gpu is not given"));
    EXPECT_THAT(refusal(config, {.gpu = 0}, {.rank = 2, .size = 2}),
                testing::HasSubstr("contradict"));
}

}  // namespace
}  // namespace ferry::train::of_ranks
