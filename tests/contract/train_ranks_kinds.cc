// Every kind of model and state on several ranks: the stage and the tiers change no bit.
#include <gtest/gtest.h>

#include <array>
#include <functional>

#include "tests/contract/train_ranks_fixture.h"
#include "tests/support/run_ranks.h"
#include "tests/support/tiny_run.h"

namespace ferry::train::of_ranks {
namespace {

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

}  // namespace
}  // namespace ferry::train::of_ranks
