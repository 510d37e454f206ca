// Ranks that have a slice of each tensor: as one rank has them whole.
#include <gtest/gtest.h>

#include <bit>
#include <cmath>

#include "tests/contract/train_ranks_fixture.h"
#include "tests/support/run_ranks.h"

namespace ferry::train::of_ranks {
namespace {

struct Slices {
    int ranks, tensor, sequence;
    friend void PrintTo(const Slices& slices, std::ostream* out) {
        *out << slices.ranks << "By" << slices.tensor << "By" << slices.sequence;
    }
};

class Tensors : public Ranks, public testing::WithParamInterface<Slices> {
protected:
    int ranks() const override { return GetParam().ranks; }
    void SetUp() override {
        Ranks::SetUp();
        if (comm::device_of_ranks() != DeviceKind::cpu) GTEST_SKIP() << "not on a GPU";
    }

    // An MLP that no number of ranks divides, and tokens that four do not.
    Config shared() const {
        Config config = this->config();
        config.model.heads = 8;
        config.model.kv_heads = 4;
        config.model.intermediate = 37;
        config.batch = {.sequence = 6, .micro_batch = 3, .micro_batches = 2};
        config.evaluate.micro_batches = 1;
        config.steps = 2;
        config.parallel = {.sequence = GetParam().sequence, .tensor = GetParam().tensor};
        return config;
    }
    static Outcome alone(Config config) {
        config.parallel = {};
        const auto executor = make_thread_executor();
        return train(*Engine::make(config, {.executor = executor.get()}), config);
    }
    static double apart(const std::vector<uint32_t>& some, const std::vector<uint32_t>& others) {
        double squares = 0, of_others = 0;
        for (size_t i = 0; i < some.size(); ++i) {
            const double a = std::bit_cast<float>(some[i]), b = std::bit_cast<float>(others[i]);
            squares += (a - b) * (a - b);
            of_others += b * b;
        }
        return of_others > 0 ? std::sqrt(squares / of_others) : std::sqrt(squares);
    }
    // Each tensor's gradient is there once, whoever has which slice of it.
    static void expect_near(const Outcome& several, const Outcome& one, double rounding) {
        EXPECT_EQ(several.before.targets, one.before.targets);
        EXPECT_NEAR(several.before.loss, one.before.loss, rounding * one.before.loss);
        ASSERT_EQ(several.reports.size(), one.reports.size());
        for (size_t i = 0; i < one.reports.size(); ++i) {
            const StepReport &a = several.reports[i], &b = one.reports[i];
            EXPECT_EQ(a.targets, b.targets);
            EXPECT_EQ(a.tokens, b.tokens);
            EXPECT_NEAR(a.loss, b.loss, rounding * b.loss) << "step " << i + 1;
            EXPECT_NEAR(a.gradient_norm, b.gradient_norm, 5 * rounding * b.gradient_norm)
                << "step " << i + 1;
            EXPECT_EQ(a.clip_factor < 1, b.clip_factor < 1);
        }
        ASSERT_EQ(several.gradients.size(), one.gradients.size());
        for (const auto& [name, gradient] : one.gradients) {
            ASSERT_EQ(several.gradients.at(name).size(), gradient.size()) << name;
            EXPECT_LT(apart(several.gradients.at(name), gradient), 50 * rounding) << name;
            ASSERT_EQ(several.weights.at(name).size(), one.weights.at(name).size()) << name;
        }
        EXPECT_NEAR(several.after.loss, one.after.loss, rounding * one.after.loss);
    }
};

TEST_P(Tensors, ChangeNoBitByStageOrTier) {
    Config config = shared();
    config.zero.stage = 3;
    const Outcome first = run(config, ranks());
    expect_equal(run(tight(config, ranks()), ranks()), first);
    config.zero.stage = 1;
    config.swap.state_on_device = 0.6;
    expect_equal(run(config, ranks()), first);
    if (ranks() == GetParam().tensor) return;  // nobody to share state with
    config.swap.state_on_device = {};
    for (const int64_t stage : {0, 1}) {
        config.zero.stage = stage;
        expect_equal(run(tight(config, ranks()), ranks()), first);
    }
}

TEST_P(Tensors, FollowTheRunOfOneAndGiveTheSameBitsAgain) {
    const Outcome several = run(shared(), ranks());
    expect_equal(run(shared(), ranks()), several);
    expect_near(several, alone(shared()), 2e-6);
}

TEST_P(Tensors, BeginWithTheWeightsOfOne) {
    Config config = shared();
    config.steps = 1;
    config.optimizer.lr = 0;
    EXPECT_EQ(run(config, ranks()).weights, alone(config).weights);
}

TEST_P(Tensors, FollowTheRunOfOneWhateverTheHeadsAndTiles) {
    Config config = shared();
    const auto compare = [&](const char* what, double rounding = 2e-6) {
        SCOPED_TRACE(what);
        expect_near(run(config, ranks()), alone(config), rounding);
    };
    config.numerics.mlp_tile = 7;
    config.model.heads = 12;
    config.model.kv_heads = 1;
    compare("tiles of the MLP, and one head of keys that every rank has");
    config.model.kv_heads = GetParam().tensor == 3 ? 3 : 2;  // which four ranks have two by two
    config.model.tie_embeddings = true;
    compare("few heads of keys, and tied embeddings");
    config.model.heads = 5;
    config.model.kv_heads = 5;
    config.model.head_dim = 4;
    config.freeze = {"*k_proj*", "*.0.mlp.*", "*.1.input_layernorm*"};
    compare("five heads, and frozen tensors");
    config.freeze = {};
    config.batch.micro_batches = ranks() / GetParam().tensor / GetParam().sequence;
    config.precision = DType::bf16;
    compare("bf16", 4e-3);
}

// An fp16 gradient that overflows in one slice is skipped on all of them.
TEST_P(Tensors, SkipTogetherWhereOneOverflows) {
    Config config = shared();
    config.model.heads = 12;
    config.model.kv_heads = 1;
    config.model.norm_eps = 1e-30;
    config.precision = DType::f16;
    config.batch.sequence = GetParam().sequence;
    config.batch.micro_batch = 1;
    config.data.held_back = 0;
    config.evaluate.micro_batches = 0;
    config.clip_norm = 1e6;
    config.steps = 14;
    const Outcome several = run(config, ranks());
    const auto skipped = std::ranges::count(several.reports, true, &StepReport::skipped);
    EXPECT_GT(skipped, 0);
    EXPECT_LT(skipped, config.steps);
    EXPECT_LT(several.reports.back().loss_scale, several.reports.front().loss_scale);
}

INSTANTIATE_TEST_SUITE_P(sliced, Tensors,
                         testing::Values(Slices{2, 2, 1}, Slices{3, 3, 1}, Slices{4, 2, 1},
                                         Slices{4, 4, 1}, Slices{4, 2, 2}),
                         [](const auto& slices) { return testing::PrintToString(slices.param); });

}  // namespace
}  // namespace ferry::train::of_ranks
