// Whole runs of several ranks: neither tiers nor what they save for backward change a bit, and an
// overflow of one is all ranks'.
#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <vector>

#include "tests/contract/train_ranks_fixture.h"
#include "tests/support/run_ranks.h"
#include "tests/support/write_tokens.h"

namespace ferry::train::of_ranks {
namespace {

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

}  // namespace
}  // namespace ferry::train::of_ranks
