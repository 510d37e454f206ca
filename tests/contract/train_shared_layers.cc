// Ranks that have some of the layers each: the numbers of ranks that have all of them.
#include <gtest/gtest.h>

#include <optional>
#include <vector>

#include "tests/contract/train_ranks_fixture.h"
#include "tests/support/quick.h"
#include "tests/support/run_ranks.h"
#include "train/prediction/predictor.h"

namespace ferry::train::of_ranks {
namespace {

struct Layers {
    int ranks, pipeline;
    int tensor = 1, sequence = 1;  // that the ranks of a stage share
    int of_a_stage() const { return ranks / pipeline; }
    int replicas() const { return of_a_stage() / tensor / sequence; }
    friend void PrintTo(const Layers& layers, std::ostream* out) {
        *out << layers.ranks << "By" << layers.pipeline;
        if (layers.tensor > 1) *out << "WithTensorsOver" << layers.tensor;
        if (layers.sequence > 1) *out << "WithSequencesOver" << layers.sequence;
    }
};

class Pipelines : public Ranks, public testing::WithParamInterface<Layers> {
protected:
    int ranks() const override { return GetParam().ranks; }
    void SetUp() override {
        Ranks::SetUp();
        const Layers& of = GetParam();
        const bool plain = ranks() == 4 && of.pipeline == 2 && of.tensor == 1 && of.sequence == 1;
        if (is_quick() && (ranks() > 4 || plain)) GTEST_SKIP() << "not in the quick run";
    }

    // Blocks that no number of stages divides.
    Config staged() const {
        Config config = this->config();
        config.model.layers = 5;
        config.batch.micro_batches = 4;
        config.evaluate.micro_batches = 3;
        config.steps = 3;
        config.zero.stage = 1;
        const Layers& layers = GetParam();
        config.parallel = {
            .sequence = layers.sequence, .tensor = layers.tensor, .pipeline = layers.pipeline};
        config.parallel.schedule = PipelineSchedule::one_f_one_b;
        if (layers.tensor == 1) return config;
        config.model.heads = 8;
        config.model.kv_heads = 4;
        config.model.intermediate = 37;
        config.model.vocab = 41;  // some ranks have a row of the tables less
        return config;
    }
    // The same micro-batches on ranks that have all layers each.
    std::optional<Outcome> whole(Config config) const {
        config.parallel.pipeline = 1;
        const int each = GetParam().of_a_stage();
        if (each > 1 && comm::ranks_launched() > 0) return std::nullopt;  // there are more
        if (each > 1) return run(config, each);
        return alone(config);
    }
    // But for the order in which fp64 norms are added nothing rounds otherwise.
    static void expect_same_numbers(const Outcome& staged, const Outcome& whole) {
        EXPECT_EQ(staged.losses(), whole.losses());
        ASSERT_EQ(staged.reports.size(), whole.reports.size());
        for (size_t i = 0; i < whole.reports.size(); ++i) {
            const StepReport &a = staged.reports[i], &b = whole.reports[i];
            EXPECT_EQ(a.skipped, b.skipped);
            EXPECT_EQ(a.targets, b.targets);
            EXPECT_EQ(a.tokens, b.tokens);
            EXPECT_NEAR(a.clip_factor, b.clip_factor, 1e-14);
            if (!a.skipped) {
                EXPECT_NEAR(a.gradient_norm, b.gradient_norm, 1e-14 * b.gradient_norm);
            }
        }
        EXPECT_EQ(staged.gradients, whole.gradients);
        EXPECT_EQ(staged.weights, whole.weights);
        EXPECT_EQ(staged.before.targets, whole.before.targets);
        EXPECT_EQ(staged.before.loss, whole.before.loss);
        EXPECT_EQ(staged.after.loss, whole.after.loss);
    }
    void compare(const char* what, const Config& config) {
        if (!spread_.takes()) return;
        SCOPED_TRACE(what);
        const Outcome found = run(config, ranks());
        if (const auto expected = whole(config)) expect_same_numbers(found, *expected);
    }

private:
    Spread spread_{3, ranks() + GetParam().pipeline + GetParam().tensor + 2 * GetParam().sequence};
};

TEST_P(Pipelines, GiveTheNumbersOfRanksThatHaveAllLayers) {
    Config config = staged();
    config.clip_norm = 0;
    compare("no clipping", config);
    config.batch.micro_batches = GetParam().replicas();
    compare("one micro-batch", config);
    config.batch.micro_batches *= 6;
    config.swap.groups = 3;
    compare("three groups of two", config);
}

// Weights' gradients add micro-batches in the same order, however much later.
TEST_P(Pipelines, GiveTheSameNumbersWhereBackwardIsSplit) {
    Config config = staged();
    config.clip_norm = 0;
    config.model.tie_embeddings = true;
    config.parallel.schedule = PipelineSchedule::zero_bubble;
    compare("in order", config);
    if (GetParam().sequence > 1) {
        config.parallel.sequence_order = SequenceOrder::ring;
        compare("sequences in a ring", config);
        config.parallel.sequence_order = SequenceOrder::automatic;
    }
    config.batch.micro_batches = GetParam().replicas();
    compare("one micro-batch", config);
    config.batch.micro_batches *= 6;
    config.swap.groups = 3;
    config.precision = DType::bf16;
    config.swap.save_attention = config.swap.save_mlp = config.swap.save_projections = 2;
    compare("three groups of two in bf16, with saved activations", config);
    config.freeze = {"*embed_tokens*", "*layers.0.*", "*layers.3.*q_proj*", "*layers.2.*norm*"};
    config.swap = {};
    compare("the first block frozen, and parts of others", config);
    const Outcome in_memory = run(config, ranks());
    keep_on_nvme(config);
    expect_equal(run(config, ranks()), in_memory);
}

// Blocks of several runs for each stage, where the numbers of stages leave two.
TEST_P(Pipelines, GiveTheSameNumbersInSeveralVirtualStages) {
    if (GetParam().pipeline > 4) GTEST_SKIP();
    for (const PipelineSchedule schedule :
         {PipelineSchedule::interleaved, PipelineSchedule::round_robin}) {
        SCOPED_TRACE(schedule == PipelineSchedule::interleaved ? "interleaved" : "round robin");
        Config config = staged();
        config.clip_norm = 0;
        config.model.layers = 2 * GetParam().pipeline + 1;
        config.parallel.schedule = schedule;
        config.parallel.virtual_stages = 2;
        compare("in order", config);
        config.model.tie_embeddings = true;
        config.batch.micro_batches = GetParam().replicas();
        compare("tied, one micro-batch", config);
        config.batch.micro_batches *= 6;
        config.swap.groups = 3;
        config.precision = DType::bf16;
        config.swap.save_attention = config.swap.save_mlp = config.swap.save_projections = 2;
        compare("three groups of two in bf16, with saved activations", config);
        config.swap = {};
        config.batch.micro_batches = 7 * GetParam().replicas();
        compare("more micro-batches than a multiple of the stages", config);
        if (HasFailure()) return;
        config.freeze = {"*embed_tokens*", "*layers.0.*", "*layers.1.*", "*layers.3.*q_proj*"};
        compare("a tied table and the first blocks frozen", config);
        const Outcome in_memory = run(config, ranks());
        keep_on_nvme(config);
        config.budgets.host_bytes = ranks() * 4 * kMiB;
        config.swap.save_inputs = 0;
        for (const int64_t stage : {0, 1, 3}) {
            if (is_quick() && stage < 3) continue;
            config.zero.stage = stage;
            expect_equal(run(config, ranks()), in_memory);
        }
        if (HasFailure()) return;
    }
}

// A run of one block for each visit.
TEST_P(Pipelines, GiveTheSameNumbersInManyVirtualStages) {
    if (GetParam().pipeline > 3 || is_quick()) GTEST_SKIP();
    Config config = staged();
    config.clip_norm = 0;
    config.steps = 2;
    config.model.layers = 4 * GetParam().pipeline;
    config.parallel.virtual_stages = 4;
    for (const PipelineSchedule schedule :
         {PipelineSchedule::interleaved, PipelineSchedule::round_robin}) {
        config.parallel.schedule = schedule;
        compare(schedule == PipelineSchedule::interleaved ? "interleaved" : "round robin", config);
    }
    config.parallel.virtual_stages = 1;
    compare("round robin through one", config);
}

// A clip factor may differ in its last bit, and with it a weight.
TEST_P(Pipelines, ClipAsRanksThatHaveAllLayers) {
    Config config = staged();
    config.clip_norm = 0.5;
    const Outcome found = run(config, ranks());
    expect_equal(run(config, ranks()), found);  // the same again
    EXPECT_GT(
        std::ranges::count_if(found.reports, [](const StepReport& r) { return r.clip_factor < 1; }),
        0);
    const auto expected = whole(config);
    if (!expected) return;
    for (size_t i = 0; i < found.reports.size(); ++i) {
        EXPECT_NEAR(found.reports[i].loss, expected->reports[i].loss, 1e-6);
        EXPECT_NEAR(found.reports[i].gradient_norm, expected->reports[i].gradient_norm, 1e-6);
    }
}

TEST_P(Pipelines, GiveTheNumbersOfRanksThatHaveAllLayersWhateverTheModel) {
    Config config = staged();
    config.clip_norm = 0;
    config.steps = 2;
    config.model.tie_embeddings = true;
    compare("tied embeddings", config);
    config.batch.micro_batches = 2 * GetParam().replicas();
    config.zero.stage = 1;
    config.precision = DType::bf16;
    compare("tied embeddings in bf16, stage 1", config);
    config.freeze = {"*embed_tokens*", "*layers.0.*", "*layers.1.*", "*layers.3.*q_proj*"};
    compare("a tied table and the first blocks frozen", config);
    config.freeze = {"*layers.4.*", "*.norm.*"};
    compare("the last block and the head's norm frozen", config);
    config.freeze = {};
    config.model.tie_embeddings = false;
    config.optimizer.moments = MomentType::bf16;
    config.optimizer.master = MasterFormat::split;
    compare("a split master", config);
    config = staged();
    config.clip_norm = 0;
    config.zero.stage = 2;
    config.zero.compress = {.gradients = CodecKind::int8, .block = 64};
    compare("coded gradients", config);
    config.zero = {.stage = 3};
    config.model.tie_embeddings = true;
    compare("weights gathered by each group", config);
    config.zero.compress = {.gradients = CodecKind::int8, .weights = CodecKind::int8, .block = 64};
    compare("coded weights", config);
}

TEST_P(Pipelines, ChangeNoBitByStageOrTier) {
    Config config = staged();
    config.model.tie_embeddings = true;
    config.zero.stage = 0;
    const Outcome first = run(config, ranks());
    Spread spread(4, ranks());
    for (const int64_t stage : {0, 1, 3}) {
        SCOPED_TRACE(testing::Message() << "stage " << stage);
        config.zero.stage = stage;
        Config on_nvme = config;
        keep_on_nvme(on_nvme);
        const bool on_gpu = config.device == DeviceKind::cuda;
        on_nvme.budgets.host_bytes = ranks() * (on_gpu ? 64 : 4) * kMiB;
        on_nvme.swap.save_inputs = 0;
        if (spread.takes()) expect_equal(run(on_nvme, ranks()), first);
        if (!on_gpu) on_nvme.budgets.device_bytes = 600 * kKiB;  // few weights stay there
        if (!on_gpu && spread.takes()) expect_equal(run(on_nvme, ranks()), first);
        Config on_device = config;
        on_device.swap.state_on_device = 0.6;
        on_device.swap.save_attention = on_device.swap.save_mlp = 2;
        if (spread.takes()) expect_equal(run(on_device, ranks()), first);
        if (HasFailure()) return;
    }
}

// Where weights and block inputs are of 16 bits, as GPUs train.
TEST_P(Pipelines, GiveTheSameNumbersInSixteenBits) {
    for (const DType precision : {DType::bf16, DType::f16}) {
        for (const auto schedule : {PipelineSchedule::one_f_one_b, PipelineSchedule::zero_bubble}) {
            SCOPED_TRACE(testing::Message()
                         << name_of(precision)
                         << (schedule == PipelineSchedule::zero_bubble ? ", zero bubble" : ""));
            Config config = staged();
            config.clip_norm = 0;
            config.precision = precision;
            config.parallel.schedule = schedule;
            config.model.tie_embeddings = precision == DType::f16;
            config.model.hidden = 128;
            config.model.head_dim = 64;  // which cuDNN attends
            config.batch.sequence = 64;
            compare("at once", config);
        }
    }
}

// To the byte: each micro-batch's block input and its gradient, and a tied table both ways.
TEST_P(Pipelines, PassOnWhatIsPlanned) {
    Config config = staged();
    config.model.tie_embeddings = true;
    comm::on_run_ranks(ranks(), [&](std::unique_ptr<comm::Communicator> others, Executor& its) {
        const auto engine =
            Engine::make(config, with({.executor = &its}, {.ranks = std::move(others)}));
        engine->step();
        engine->step();
        const planner::Plan& plan = Inside(*engine).plan();
        const zero::Stage& stage = plan.partition.stage;
        int64_t sent = 0;
        for (const CollectiveReport& of : engine->report().collectives)
            if (of.collective == "pass on") sent += of.sent_bytes;
        const int64_t ways = (stage.is_first() ? 0 : 1) + (stage.is_last() ? 0 : 1);
        int64_t planned = 2 * plan.micro_batches * ways * plan.input_bytes;
        const int64_t table = plan.layers[0].elements;
        if (stage.copies_table()) planned += 2 * table * 4;
        // After each update: behind the last one for the report, which wants all weights.
        if (stage.gives_table()) planned += 2 * table * size_of(plan.compute);
        EXPECT_EQ(sent, planned);
    });
}

// An fp16 gradient that overflows in one stage is skipped on all of them.
TEST_P(Pipelines, SkipTogetherWhereOneOverflows) {
    Config config = staged();
    config.batch = {.sequence = GetParam().sequence, .micro_batch = 1, .micro_batches = 4};
    expect_some_overflow(config, ranks());
}

INSTANTIATE_TEST_SUITE_P(staged, Pipelines,
                         testing::Values(Layers{2, 2}, Layers{3, 3}, Layers{4, 2}, Layers{4, 4},
                                         Layers{4, 2, 2}, Layers{6, 2, 3}, Layers{8, 2, 2},
                                         Layers{4, 2, 1, 2}),
                         testing::PrintToStringParamName());

// ---------------------------------------------------------------- every mix

// How many ranks share tensors and layers, and how often that is done beside.
struct Mix {
    int tensor, pipeline, replicas;
    int ranks() const { return tensor * pipeline * replicas; }
};
std::vector<Mix> mixes_of(int ranks) {
    std::vector<Mix> mixes;
    for (int tensor = 1; tensor <= ranks; ++tensor)
        for (int pipeline = 1; tensor * pipeline <= ranks; ++pipeline)
            if (ranks % (tensor * pipeline) == 0)
                mixes.push_back({tensor, pipeline, ranks / tensor / pipeline});
    return mixes;
}

class Mixes : public Ranks {
protected:
    void SetUp() override {
        if (comm::ranks_launched() > 0) GTEST_SKIP() << "for threads of one process";
    }
    // Eight blocks, heads and micro-batches; an MLP and a vocabulary that no ranks divide.
    Config mixed(bool tied) const {
        Config config = this->config();
        config.model.layers = config.model.heads = 8;
        config.model.kv_heads = 4;
        config.model.intermediate = 37;
        config.model.vocab = 41;
        config.model.tie_embeddings = tied;
        config.batch.micro_batches = 8;
        config.evaluate.micro_batches = 3;
        config.steps = 2;
        return config;
    }
    static Config cut(Config config, const Mix& mix, int64_t stage) {
        config.parallel = {.tensor = mix.tensor, .pipeline = mix.pipeline};
        config.zero.stage = stage;
        return config;
    }
};

// Clipped, so that a gradient that counts twice in the norm shows in all weights. The quick run has
// those alone in which ranks share tensors and layers, of a tied table.
TEST_F(Mixes, FollowTheRunOfOne) {
    for (const bool tied : {false, true}) {
        if (is_quick() && !tied) continue;
        const Outcome one = alone(mixed(tied));
        EXPECT_LT(one.reports.front().clip_factor, 1);
        for (const int ranks : {2, 4, 8}) {
            int64_t stage = tied ? 3 : 0;  // another one for each
            for (const Mix& mix : mixes_of(ranks)) {
                stage = (stage + 1) % 4;
                if (is_quick() && (mix.tensor == 1 || mix.pipeline == 1)) continue;
                SCOPED_TRACE(testing::Message()
                             << mix.tensor << " x " << mix.pipeline << " x " << mix.replicas
                             << ", stage " << stage << (tied ? ", tied" : ""));
                expect_near_each(run(cut(mixed(tied), mix, stage), ranks), one, 2e-6);
                if (HasFailure()) return;
            }
        }
    }
}

// Where tensor ranks, stages and replicas meet no bit depends on what ZeRO shares, and a run
// repeated is the same.
TEST_F(Mixes, ChangeNoBitByStage) {
    const Mix mix{2, 2, 2};
    const Outcome first = run(cut(mixed(true), mix, 0), mix.ranks());
    for (const int64_t stage : {0, 1, 2, 3}) {
        if (is_quick() && (stage == 1 || stage == 2)) continue;
        SCOPED_TRACE(testing::Message() << "stage " << stage);
        expect_equal(run(cut(mixed(true), mix, stage), mix.ranks()), first);
        if (HasFailure()) return;
    }
}

// What a rank takes of each tier when it has trained, against the plan that another process makes
// for a rank of its stage. Headers lie beside the volume's slots.
void expect_reserved(const RunReport& report, const planner::Plan& planned) {
    const Reserved& took = report.reserved;
    EXPECT_EQ(took.device_bytes, planned.device_bytes);
    EXPECT_EQ(took.host_bytes, planned.host_bytes);
    int64_t stored = 0;
    for (const planner::TierRow& row : planned.rows)
        stored +=
            row.tier == swap::Tier::nvme && row.kind != planner::RowKind::headers ? row.bytes : 0;
    EXPECT_EQ(took.nvme_bytes, stored);
    EXPECT_LE(took.nvme_peak_bytes, stored);
    EXPECT_EQ(took.nvme_peak_bytes > 0, stored > 0);
}

// To the byte: every rank of every way to share tensors, sequences, layers and state, with state
// and activations on NVMe; of four ranks in memory too. The quick run has four, on NVMe alone.
TEST_F(Mixes, ReserveWhatIsPlanned) {
    int64_t zero = 3;  // another stage for each
    for (const int ranks : {4, 8}) {
        if (is_quick() && ranks > 4) continue;
        for (const Mix& mix : mixes_of(ranks)) {
            for (const int sequence : {1, 2}) {
                if (mix.replicas % sequence != 0) continue;
                zero = (zero + 1) % 4;
                for (const bool stored : {false, true}) {
                    if ((is_quick() || ranks > 4) && !stored) continue;
                    SCOPED_TRACE(testing::Message()
                                 << "T " << mix.tensor << ", S " << sequence << ", P "
                                 << mix.pipeline << ", " << ranks << " ranks, stage " << zero
                                 << (stored ? ", on NVMe" : ""));
                    Config config = cut(mixed(true), mix, zero);
                    config.parallel.sequence = sequence;
                    if (stored) {
                        keep_on_nvme(config);
                        config.budgets.host_bytes = ranks * 4 * kMiB;
                        config.swap.save_inputs = 0;
                    }
                    const auto plans = Predictor::make(config, {.ranks = ranks, .on_a_host = ranks})
                                           ->plans(request_of(config));
                    ASSERT_EQ(std::ssize(plans), mix.pipeline);
                    comm::on_run_ranks(
                        ranks, [&](std::unique_ptr<comm::Communicator> others, Executor& its) {
                            const auto stage = others->rank() / (ranks / mix.pipeline);
                            const auto engine = Engine::make(
                                config, with({.executor = &its}, {.ranks = std::move(others)}));
                            engine->step();
                            engine->step();
                            expect_reserved(engine->report(), plans[static_cast<size_t>(stage)]);
                        });
                    if (HasFailure()) return;
                }
            }
        }
    }
}

}  // namespace
}  // namespace ferry::train::of_ranks
