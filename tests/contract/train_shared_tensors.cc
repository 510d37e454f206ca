// Ranks that have a slice of each tensor: as one rank has them whole.
#include <gtest/gtest.h>

#include "tests/contract/train_ranks_fixture.h"
#include "tests/support/quick.h"
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

    // An MLP and a vocabulary that no number of ranks divides, and tokens that four do not.
    Config shared() const {
        Config config = this->config();
        config.model.heads = 8;
        config.model.kv_heads = 4;
        config.model.intermediate = 37;
        config.model.vocab = 41;
        config.numerics.head_tile = 7;
        config.batch = {.sequence = 6, .micro_batch = 3, .micro_batches = 2};
        config.evaluate.micro_batches = 1;
        config.steps = 2;
        config.parallel = {.sequence = GetParam().sequence, .tensor = GetParam().tensor};
        return config;
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
    expect_near_each(several, alone(shared()), 2e-6);
}

TEST_P(Tensors, BeginWithTheWeightsOfOne) {
    Config config = shared();
    config.steps = 1;
    config.optimizer.lr = 0;
    EXPECT_EQ(run(config, ranks()).weights, alone(config).weights);
}

TEST_P(Tensors, FollowTheRunOfOneWhateverTheHeadsAndTiles) {
    Config config = shared();
    Spread spread(3, ranks() + GetParam().tensor);
    const auto compare = [&](const char* what, double rounding = 2e-6) {
        if (!spread.takes()) return;
        SCOPED_TRACE(what);
        expect_near_each(run(config, ranks()), alone(config), rounding);
    };
    config.numerics.mlp_tile = 7;
    config.numerics.head_tile = {};
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
    config.freeze = {"*embed_tokens*"};
    compare("a frozen table, of which the head has a gradient no more");
    config.model.tie_embeddings = false;
    config.freeze = {"*lm_head*", "*norm*"};
    compare("a frozen head");
    config.freeze = {};
    config.batch.micro_batches = ranks() / GetParam().tensor / GetParam().sequence;
    config.precision = DType::bf16;
    if (config.device == DeviceKind::cuda) config.model.head_dim = 8;
    compare("bf16", 4e-3);
}

// Patterns of blocks and documents, of this rank's heads. A GPU's kernels know both in 16 bits
// alone.
TEST_P(Tensors, FollowTheRunOfOneWhateverTheMask) {
    if (GetParam().tensor == 3) GTEST_SKIP() << "a pattern wants heads of keys that they divide";
    Config config = shared();
    const bool on_gpu = config.device == DeviceKind::cuda;
    if (on_gpu) config.precision = DType::bf16;
    config.model.head_dim = 8;
    config.batch = {.sequence = 132, .micro_batch = 1, .micro_batches = 4};
    Spread spread(2, GetParam().tensor * GetParam().sequence / 2);
    const auto compare = [&](const char* what) {
        if (!spread.takes()) return;
        SCOPED_TRACE(what);
        const Outcome several = run(config, ranks());
        expect_equal(run(config, ranks()), several);
        expect_near(several, alone(config), on_gpu ? 4e-3 : 2e-6);
    };
    config.attention = {.pattern = AttentionPattern::fixed,
                        .different_layout_per_head = true,
                        .num_local_blocks = 2,
                        .num_different_global_patterns = 2};
    compare("a pattern for each head");
    config.attention = {};
    read_documents(config);
    compare("documents");
}

// Where weights and sums are of 16 bits, as GPUs train.
TEST_P(Tensors, FollowTheRunOfOneInSixteenBits) {
    Spread spread(2, ranks());
    for (const DType precision : {DType::bf16, DType::f16}) {
        if (!spread.takes()) continue;
        SCOPED_TRACE(name_of(precision));
        Config config = shared();
        config.precision = precision;
        config.model.hidden = 128;
        config.model.head_dim = 64;  // which cuDNN attends
        config.model.intermediate = 200;
        config.batch.sequence = 64;
        const Outcome several = run(config, ranks());
        expect_equal(run(config, ranks()), several);
        expect_equal(run(tight(config, ranks()), ranks()), several);
        Config on_device = config;
        on_device.zero.stage = 1;
        on_device.swap.state_on_device = 0.6;
        expect_equal(run(on_device, ranks()), several);
        expect_near(several, alone(config), 4e-3);
    }
}

// What kernels of the plan exchange, to the byte.
TEST_P(Tensors, SendWhatIsPlanned) {
    const Config config = shared();
    comm::on_run_ranks(ranks(), [&](std::unique_ptr<comm::Communicator> others, Executor& its) {
        const auto engine =
            Engine::make(config, with({.executor = &its}, {.ranks = std::move(others)}));
        engine->step();
        const planner::Plan& plan = Inside(*engine).plan();
        int64_t calls = 0, bytes = 0;
        for (const CollectiveReport& of : engine->report().collectives) {
            if (of.collective != "exchange sums" && of.collective != "gather sums" &&
                of.collective != "exchange heads")
                continue;
            calls += of.calls;
            bytes += of.sent_bytes;
        }
        for (int64_t layer = 0; layer < std::ssize(plan.layers); ++layer) {
            const bool is_head = layer == std::ssize(plan.layers) - 1;
            const model::BlockExchanges planned = plan.exchanges_of(layer);
            for (const bool back : {false, true}) {
                if (is_head && !back) continue;  // its backward is both ways
                calls -= plan.micro_batches * planned.calls(back);
                bytes -= plan.micro_batches * planned.bytes(back);
            }
        }
        EXPECT_EQ(calls, 0);
        EXPECT_EQ(bytes, 0);
    });
}

// Of the first tokens, from all ranks' columns; one of the ranks has no room for them.
TEST_P(Tensors, GiveTheLogitsOfOne) {
    Config config = shared();
    config.evaluate.micro_batches = ranks() / GetParam().tensor;
    const int64_t tokens = config.batch.sequence * config.batch.micro_batch;
    if (GetParam().sequence > 1) GTEST_SKIP() << "each rank has other tokens";
    std::vector<float> expected(static_cast<size_t>(tokens * config.model.vocab));
    const auto executor = make_thread_executor();
    engine_alone(config, *executor)->evaluate(expected);
    std::vector<std::vector<float>> found(static_cast<size_t>(ranks()), expected);
    for (std::vector<float>& logits : found) std::ranges::fill(logits, 0.0f);
    found.back().clear();
    const std::vector<int> here =
        comm::on_run_ranks(ranks(), [&](std::unique_ptr<comm::Communicator> others, Executor& its) {
            const auto rank = static_cast<size_t>(others->rank());
            Engine::make(config, with({.executor = &its}, {.ranks = std::move(others)}))
                ->evaluate(found[rank]);
        });
    for (const int rank : here) {
        if (rank >= GetParam().tensor || rank == ranks() - 1) continue;  // other tokens, or none
        SCOPED_TRACE(rank);
        for (size_t i = 0; i < expected.size(); ++i)
            ASSERT_NEAR(found[static_cast<size_t>(rank)][i], expected[i], 1e-5);
    }
}

// An fp16 gradient that overflows in one slice is skipped on all of them.
TEST_P(Tensors, SkipTogetherWhereOneOverflows) {
    Config config = shared();
    config.model.heads = 12;
    config.model.kv_heads = 1;
    config.batch.sequence = GetParam().sequence;
    config.batch.micro_batch = 1;
    expect_some_overflow(config, ranks());
}

INSTANTIATE_TEST_SUITE_P(sliced, Tensors,
                         testing::Values(Slices{2, 2, 1}, Slices{3, 3, 1}, Slices{4, 2, 1},
                                         Slices{4, 4, 1}, Slices{4, 2, 2}),
                         [](const auto& slices) { return testing::PrintToString(slices.param); });

}  // namespace
}  // namespace ferry::train::of_ranks
