// Ranks that share sequences, by their heads or in a ring: as one rank has them whole.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <optional>

#include "tests/contract/train_ranks_fixture.h"
#include "tests/support/quick.h"
#include "tests/support/run_ranks.h"
#include "tests/support/tiny_run.h"

namespace ferry::train::of_ranks {
namespace {

struct Sharing {
    int ranks, sequence;
    SequenceOrder order = SequenceOrder::heads;
    friend void PrintTo(const Sharing& sharing, std::ostream* out) {
        *out << sharing.ranks << "By" << sharing.sequence
             << (sharing.order == SequenceOrder::ring ? "InARing" : "");
    }
};

class Sequences : public Ranks, public testing::WithParamInterface<Sharing> {
protected:
    static constexpr double kRoundingOfBf16 = 2e-3;
    int ranks() const override { return GetParam().ranks; }
    // A GPU attends parts in 16 bits alone, of heads whose rows begin at multiples of 16 bytes.
    bool is_ring_of_gpus() const {
        return GetParam().order == SequenceOrder::ring &&
               comm::device_of_ranks() == DeviceKind::cuda;
    }
    double rounding() const { return is_ring_of_gpus() ? kRoundingOfBf16 : 2e-6; }

    // Two rows a micro-batch, and heads that two and three ranks divide but four do not.
    Config shared(int sequence) const {
        Config config = this->config();
        config.model.heads = 12;
        config.model.kv_heads = 6;
        config.batch = {.sequence = 12, .micro_batch = 2, .micro_batches = 4};
        if (ranks() == 3) config.batch.micro_batches = 3;
        config.evaluate.micro_batches = 3;
        config.steps = 3;
        config.parallel.sequence = sequence;
        config.parallel.sequence_order = GetParam().order;
        if (is_ring_of_gpus()) {
            config.precision = DType::bf16;
            config.model.head_dim = 8;
        }
        return config;
    }
};

TEST_P(Sequences, ChangeNoBitByStageOrTier) {
    expect_stages_equal(shared(GetParam().sequence), ranks());
}

TEST_P(Sequences, FollowTheRunOfOne) {
    const Config config = shared(GetParam().sequence);
    const Outcome several = run(config, ranks());
    expect_equal(run(config, ranks()), several);  // the same again
    expect_near(several, alone(config), rounding());
}

// Which heads a rank has, and which part of a sequence, changes nothing else.
TEST_P(Sequences, FollowTheRunOfOneWhateverTheHeadsAndTheMask) {
    Config config = shared(GetParam().sequence);
    const bool on_gpu = config.device == DeviceKind::cuda;
    Spread spread(3, ranks() + GetParam().sequence);
    const auto compare = [&](const char* what, std::optional<double> rounding = {}) {
        if (!spread.takes()) return;
        SCOPED_TRACE(what);
        config.steps = 2;
        expect_near(run(config, ranks()), alone(config), rounding.value_or(this->rounding()));
    };
    config.model.kv_heads = 3;
    compare("three heads of keys");
    config.model.kv_heads = 1;
    compare("one head of keys: fewer than ranks");
    config.model.kv_heads = 2;
    compare("two heads of keys");
    config.model.heads = 5;
    config.model.kv_heads = 5;
    config.model.head_dim = is_ring_of_gpus() ? 8 : 4;
    compare("five heads");
    const double of_masks = on_gpu ? kRoundingOfBf16 : 2e-6;
    if (on_gpu) {  // whose kernels know masks in 16 bits alone
        config.precision = DType::bf16;
        config.model.head_dim = 8;
    }
    config.batch.sequence = 132;  // three blocks of 64, the last one short
    config.batch.micro_batches = ranks();
    config.evaluate.micro_batches = 1;
    config.attention = {.pattern = AttentionPattern::bigbird,
                        .different_layout_per_head = true,
                        .different_layout_per_layer = true,
                        .num_random_blocks = 0,
                        .num_sliding_window_blocks = 1};
    compare("a pattern", of_masks);
    config.attention = {.pattern = AttentionPattern::fixed,
                        .different_layout_per_head = true,
                        .num_local_blocks = 2,
                        .num_different_global_patterns = 2};
    compare("a pattern for each head", of_masks);
    config.attention = {};
    read_documents(config);
    compare("documents", of_masks);
    config.precision = DType::bf16;
    compare("bf16", kRoundingOfBf16);
}

// They are of the numerics record: another number rounds otherwise.
TEST_P(Sequences, AreNamedByTheRecord) {
    const auto record_of = [&](int sequence) {
        std::string record;
        Config config = shared(sequence);
        comm::on_run_ranks(ranks(),
                           [&](std::unique_ptr<comm::Communicator> others, Executor& executor) {
                               const bool mine = comm::ranks_launched() > 0 || others->rank() == 0;
                               Runtime runtime{.executor = &executor};
                               runtime = with(std::move(runtime), {.ranks = std::move(others)});
                               const auto engine = Engine::make(config, std::move(runtime));
                               if (mine) record = engine->numerics_record();
                           });
        return record;
    };
    const int sequence = GetParam().sequence;
    const bool ring = GetParam().order == SequenceOrder::ring;
    EXPECT_THAT(record_of(sequence),
                testing::HasSubstr("; ranks " + std::to_string(ranks()) + ", sequences over " +
                                   std::to_string(sequence) + (ring ? " in a ring;" : ";")));
    EXPECT_THAT(record_of(1), testing::Not(testing::HasSubstr("sequences over")));
}

INSTANTIATE_TEST_SUITE_P(shared, Sequences,
                         testing::Values(Sharing{2, 2}, Sharing{3, 3}, Sharing{4, 2},
                                         Sharing{4, 4}),
                         testing::PrintToStringParamName());
INSTANTIATE_TEST_SUITE_P(ring, Sequences,
                         testing::Values(Sharing{2, 2, SequenceOrder::ring},
                                         Sharing{3, 3, SequenceOrder::ring},
                                         Sharing{4, 2, SequenceOrder::ring},
                                         Sharing{4, 4, SequenceOrder::ring}),
                         testing::PrintToStringParamName());

}  // namespace
}  // namespace ferry::train::of_ranks
