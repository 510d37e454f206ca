// Ranks that send their gradients, weights or momentum in few bits.
#include <gtest/gtest.h>

#include <array>
#include <bit>
#include <cmath>
#include <functional>

#include "tests/contract/train_ranks_fixture.h"

namespace ferry::train::of_ranks {
namespace {

// What the codec changes is within half a step of it, a rank, and some of it.
TEST_F(Ranks, WhoseGradientsAreCodedAreCloseToThoseThatRound) {
    Config config = this->config();
    if (config.device != DeviceKind::cpu) GTEST_SKIP() << "no kernels there";
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
    if (config.device != DeviceKind::cpu) GTEST_SKIP() << "no kernels there";
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

// Two updates are exact; the others are of momentum as signs.
class OfOnebitAdam : public Ranks, public testing::WithParamInterface<int> {
protected:
    int ranks() const override { return 3; }
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
    if (config.device != DeviceKind::cpu) GTEST_SKIP() << "no kernels there";
    const std::array<std::function<void()>, 5> kinds{
        [] {},
        [&] {  // several chunks a shard, the last one smaller
            config.swap.chunk_elements = 8192;
            config.model.hidden = 64;
            config.model.intermediate = 160;
            config.model.head_dim = 32;
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
    int ranks() const override { return 3; }
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
    if (config.device != DeviceKind::cpu) GTEST_SKIP() << "no kernels there";
    const std::array<std::function<void()>, 3> kinds{
        [] {},
        [&] {  // several chunks a shard, the last one smaller
            config.swap.chunk_elements = 8192;
            config.model.hidden = 64;
            config.model.intermediate = 160;
            config.model.head_dim = 32;
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
    if (config.device != DeviceKind::cpu) GTEST_SKIP() << "no kernels there";
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
    tight.budgets.host_bytes = ranks() * 1200 * kKiB;
    expect_equal(run(tight, ranks()), first);
    config.swap.chunk_elements = 8192;
    expect_equal(run(config, ranks()), first);
    config.optimizer.local_step_clipper = 1;
    EXPECT_NE(run(config, ranks()).hash, first.hash);
}

INSTANTIATE_TEST_SUITE_P(kinds, OfZerooneAdam, testing::Range(0, 3));

// Between two exchanges each rank trains weights of its own, and still towards a lower loss.
TEST_F(Ranks, OfZerooneAdamLearnAlone) {
    Config config = this->config();
    if (config.device != DeviceKind::cpu) GTEST_SKIP() << "no kernels there";
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
    if (config.device != DeviceKind::cpu) GTEST_SKIP() << "no kernels there";
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
