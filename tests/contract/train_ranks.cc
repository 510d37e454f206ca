// Whole runs of several ranks: the stage and the tiers change no bit, the number of ranks no more
// than the rounding of their gradients.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <bit>
#include <chrono>
#include <cmath>
#include <fstream>
#include <functional>
#include <map>
#include <optional>
#include <stdexcept>

#include "cost/simulator.h"
#include "cost/traffic.h"
#include "rank_agreement.h"
#include "tests/support/borrowed_ranks.h"
#include "tests/support/nccl_unique_id.h"
#include "tests/support/run_ranks.h"
#include "tests/support/simulated_ranks.h"
#include "tests/support/tiny_run.h"
#include "tests/support/write_tokens.h"
#include "train/from_config.h"
#include "train/inside.h"
#include "train/prediction/predictor.h"

namespace ferry::train {
namespace {

struct Outcome {
    uint64_t hash = 0;
    std::vector<StepReport> reports{};
    Evaluation before{}, after{};
    // In bits: a gradient that overflowed equals itself. `gradients`: of the last step.
    std::map<std::string, std::vector<uint32_t>> weights{}, gradients{};

    std::vector<double> losses() const {
        std::vector<double> losses;
        for (const StepReport& report : reports) losses.push_back(report.loss);
        return losses;
    }
};

Outcome train(Engine& engine, const Config& config) {
    Outcome outcome;
    const bool evaluates = config.evaluate.micro_batches > 0;
    if (evaluates) outcome.before = engine.evaluate();
    for (int64_t step = 0; step < config.steps; ++step) outcome.reports.push_back(engine.step());
    const auto bits_into = [](std::vector<uint32_t>& bits) {
        return [&bits](std::span<const float> piece) {
            for (const float value : piece) bits.push_back(std::bit_cast<uint32_t>(value));
        };
    };
    const auto for_tensors = [&](const auto& body) {
        for (size_t layer = 0; layer < Inside(engine).layers().size(); ++layer) {
            for (const model::Tensor& tensor : Inside(engine).layers()[layer].tensors)
                body(static_cast<int64_t>(layer), tensor);
        }
    };
    for_tensors([&](int64_t layer, const model::Tensor& tensor) {
        Inside(engine).read_gradient(layer, tensor, bits_into(outcome.gradients[tensor.name]));
    });
    for_tensors([&](int64_t layer, const model::Tensor& tensor) {
        Inside(engine).read_tensor(layer, tensor, bits_into(outcome.weights[tensor.name]));
    });
    if (evaluates) outcome.after = engine.evaluate();
    outcome.hash = engine.state_hash();
    return outcome;
}

void expect_equal(const Outcome& a, const Outcome& b) {
    EXPECT_EQ(a.hash, b.hash);
    EXPECT_EQ(a.losses(), b.losses());
    ASSERT_EQ(a.reports.size(), b.reports.size());
    for (size_t i = 0; i < a.reports.size(); ++i) {
        EXPECT_EQ(a.reports[i].skipped, b.reports[i].skipped);
        EXPECT_EQ(a.reports[i].clip_factor, b.reports[i].clip_factor);
        if (!a.reports[i].skipped) {
            EXPECT_EQ(a.reports[i].gradient_norm, b.reports[i].gradient_norm);
        }
    }
    EXPECT_EQ(a.gradients, b.gradients);
    EXPECT_EQ(a.weights, b.weights);
    EXPECT_EQ(a.before.targets, b.before.targets);
    if (a.before.targets > 0) {
        EXPECT_EQ(a.before.loss, b.before.loss);
        EXPECT_EQ(a.after.loss, b.after.loss);
    }
}

// The same on every rank; how each of them gets to know the others, `bring` puts into the Runtime.
using Bring = std::function<void(Runtime&, std::unique_ptr<comm::Communicator>)>;
Outcome run(
    const Config& config, int ranks,
    const Bring& bring = [](Runtime& runtime, std::unique_ptr<comm::Communicator> others) {
        runtime = with(std::move(runtime), {.ranks = std::move(others)});
    }) {
    std::vector<Outcome> outcomes(static_cast<size_t>(ranks));
    const std::vector<int> here = comm::on_run_ranks(
        ranks, [&](std::unique_ptr<comm::Communicator> others, Executor& executor) {
            const auto rank = static_cast<size_t>(others->rank());
            Runtime runtime{.executor = &executor};
            bring(runtime, std::move(others));
            const auto engine = Engine::make(config, std::move(runtime));
            outcomes[rank] = train(*engine, config);
        });
    const Outcome& first = outcomes[static_cast<size_t>(here.front())];
    for (const int rank : here) expect_equal(first, outcomes[static_cast<size_t>(rank)]);
    return first;
}

// A rank's smallest budget, as the error names it that refuses less.
int64_t smallest_device_budget(Config config, int ranks) {
    config.budgets.device_bytes = 1;
    try {
        Predictor::make(config, {.ranks = ranks, .on_a_host = ranks})->plan(request_of(config));
    } catch (const Error& error) {
        const std::string& needed = error.problem().measured;  // "1.00 MiB needed (1048576 bytes)"
        return std::stoll(needed.substr(needed.find('(') + 1));
    }
    return 0;
}

class Ranks : public testing::Test {
protected:
    void SetUp() override {
        if (comm::ranks_launched() > 0 && comm::ranks_launched() != ranks())
            GTEST_SKIP() << "for " << ranks() << " ranks";
    }
    void TearDown() override { comm::await_all_ranks(); }
    virtual int ranks() const { return 2; }

    // Micro-batches for 1, 2, 3 and 4 ranks; several segments, and tensors of sizes that no number
    // of ranks divides.
    Config config() const {
        Config config = tiny_config(data_);
        config.data.tokens = comm::as_first_rank_says(config.data.tokens);
        config.device = comm::device_of_ranks();
        config.batch = {.sequence = 8, .micro_batch = 1, .micro_batches = 12};
        config.data.held_back = 0.2;
        config.evaluate.micro_batches = 5;
        config.steps = 4;
        config.clip_norm = 0.5;
        return config;
    }
    // As little as possible in memory, every speculative update made, two groups.
    Config tight(Config config, int ranks) const {
        config.budgets.nvme = {
            {.path = comm::as_first_rank_says(directory_.path()), .size_bytes = 64 * kMiB}};
        const bool keeps = config.zero.secondary_shard != SecondShard::none;
        config.budgets.host_bytes = ranks * (keeps ? 700 : 500) * kKiB;
        if (config.device == DeviceKind::cuda) {
            config.budgets.host_bytes = ranks * 64 * kMiB;
            config.swap.state_on_nvme = 1;
        }
        if (optim::sends_momentum(config.optimizer.method)) {  // three turns' momentum pass
            config.budgets.host_bytes = ranks * 900 * kKiB;
            config.swap.state_on_nvme = 1;
        }
        config.swap.speculate = Speculate::all;
        const int64_t each = config.batch.micro_batches * config.parallel.tensor / ranks;
        config.swap.groups = each % 2 == 0 ? 2 : 1;
        config.io.direct = false;
        if (config.device == DeviceKind::cpu)
            config.budgets.device_bytes = smallest_device_budget(config, ranks);
        return config;
    }
    void expect_stages_equal(Config config, int ranks) const {
        config.zero.stage = 3;
        const Outcome first = run(config, ranks);
        for (const int64_t stage : {0, 1, 2, 3}) {
            SCOPED_TRACE("stage " + std::to_string(stage));
            config.zero.stage = stage;
            expect_equal(run(config, ranks), first);
            expect_equal(run(tight(config, ranks), ranks), first);
            Config on_device = config;
            on_device.swap.state_on_device = 0.6;
            expect_equal(run(on_device, ranks), first);
            if (HasFailure()) return;
        }
    }

    const TinyData data_;
    const TemporaryDirectory directory_{};
};

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
    const auto executor = make_thread_executor();
    const Outcome one = train(*Engine::make(config, {.executor = executor.get()}), config);
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

OptimizerConfig muon() {
    return {.method = optim::Method::muon,
            .lr = 0.02,
            .weight_decay = 0.1,
            .momentum = 0.95,
            .nesterov = true,
            .adamw_lr = 3e-3};
}

// Each rank has whole matrices, and so there is nothing but that rounding between them too; what it
// is to a singular value near zero is more to its direction.
TEST_P(EachNumber, OfRanksWithWholeMatricesFollowsTheRunOfOne) {
    Config config = this->config();
    config.optimizer = muon();
    const Outcome several = run(config, GetParam());
    const auto executor = make_thread_executor();
    const Outcome one = train(*Engine::make(config, {.executor = executor.get()}), config);
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
        [&] {  // several chunks a shard, the last one smaller
            config.swap.chunk_elements = 8192;
            config.model.hidden = 64;
            config.model.intermediate = 160;
            config.model.head_dim = 32;
        },
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
    if (GetParam() >= 10 && config.device != DeviceKind::cpu) GTEST_SKIP() << "no kernels there";
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

// ---------------------------------------------------------------- ranks that share sequences

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
    static Outcome alone(Config config) {
        config.parallel.sequence = 1;
        const auto executor = make_thread_executor();
        return train(*Engine::make(config, {.executor = executor.get()}), config);
    }
    // As ranks that share none do, with the gradients of a part each.
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
        EXPECT_NEAR(several.after.loss, one.after.loss, rounding * one.after.loss);
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
    const auto compare = [&](const char* what, std::optional<double> rounding = {}) {
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
    std::vector<uint32_t> tokens(1500);
    std::vector<uint64_t> documents;
    for (size_t i = 0; i < tokens.size(); ++i) {
        tokens[i] = static_cast<uint32_t>((i * i / 7 + i) % 31);
        if (i * i % 37 == 0) documents.push_back(i);
    }
    const std::string path = comm::as_first_rank_says(directory_ / "documents.bin");
    if (comm::launched_rank().value_or(0) == 0) write_tokens(path, tokens, 32, {}, documents);
    comm::await_all_ranks();
    config.data.tokens = path;
    config.data.isolate_documents = true;
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

// ---------------------------------------------------------------- ranks that share tensors

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

// ---------------------------------------------------------------- ranks that share layers

struct Layers {
    int ranks, pipeline;
    friend void PrintTo(const Layers& layers, std::ostream* out) {
        *out << layers.ranks << "By" << layers.pipeline;
    }
};

class Pipelines : public Ranks, public testing::WithParamInterface<Layers> {
protected:
    int ranks() const override { return GetParam().ranks; }
    void SetUp() override {
        Ranks::SetUp();
        if (comm::device_of_ranks() != DeviceKind::cpu) GTEST_SKIP() << "not on a GPU";
    }

    // Blocks that no number of stages divides.
    Config staged() const {
        Config config = this->config();
        config.model.layers = 5;
        config.batch.micro_batches = 4;
        config.evaluate.micro_batches = 3;
        config.steps = 3;
        config.zero.stage = 1;
        config.parallel.pipeline = GetParam().pipeline;
        return config;
    }
    // The same micro-batches on ranks that have all layers each.
    std::optional<Outcome> whole(Config config) const {
        config.parallel.pipeline = 1;
        const int each = ranks() / GetParam().pipeline;
        if (each > 1 && comm::ranks_launched() > 0) return std::nullopt;  // there are more
        if (each > 1) return run(config, each);
        const auto executor = make_thread_executor();
        return train(*Engine::make(config, {.executor = executor.get()}), config);
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
    void compare(const char* what, const Config& config) const {
        SCOPED_TRACE(what);
        const auto expected = whole(config);
        const Outcome found = run(config, ranks());
        if (expected) expect_same_numbers(found, *expected);
    }
};

TEST_P(Pipelines, GiveTheNumbersOfRanksThatHaveAllLayers) {
    Config config = staged();
    config.clip_norm = 0;
    compare("no clipping", config);
    config.batch.micro_batches = ranks() / GetParam().pipeline;
    compare("one micro-batch", config);
    config.batch.micro_batches *= 6;
    config.swap.groups = 3;
    compare("three groups of two", config);
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
    config.batch.micro_batches = 2 * ranks() / GetParam().pipeline;
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
}

TEST_P(Pipelines, ChangeNoBitByStageOrTier) {
    Config config = staged();
    config.model.tie_embeddings = true;
    config.zero.stage = 0;
    const Outcome first = run(config, ranks());
    for (const int64_t stage : {0, 1}) {
        SCOPED_TRACE(testing::Message() << "stage " << stage);
        config.zero.stage = stage;
        Config on_nvme = config;
        on_nvme.budgets.nvme = {
            {.path = comm::as_first_rank_says(directory_.path()), .size_bytes = 64 * kMiB}};
        on_nvme.budgets.host_bytes = ranks() * 4 * kMiB;
        on_nvme.swap.state_on_nvme = 1;
        on_nvme.swap.speculate = Speculate::all;
        on_nvme.swap.save_inputs = 0;
        on_nvme.io.direct = false;
        expect_equal(run(on_nvme, ranks()), first);
        on_nvme.budgets.device_bytes = 600 * kKiB;  // few weights stay there
        expect_equal(run(on_nvme, ranks()), first);
        Config on_device = config;
        on_device.swap.state_on_device = 0.6;
        on_device.swap.save_attention = on_device.swap.save_mlp = 2;
        expect_equal(run(on_device, ranks()), first);
        if (HasFailure()) return;
    }
}

// An fp16 gradient that overflows in one stage is skipped on all of them.
TEST_P(Pipelines, SkipTogetherWhereOneOverflows) {
    Config config = staged();
    config.model.norm_eps = 1e-30;
    config.precision = DType::f16;
    config.batch = {.sequence = 1, .micro_batch = 1, .micro_batches = 4};
    config.data.held_back = 0;
    config.evaluate.micro_batches = 0;
    config.clip_norm = 1e6;
    config.steps = 14;
    const Outcome found = run(config, ranks());
    const auto skipped = std::ranges::count(found.reports, true, &StepReport::skipped);
    EXPECT_GT(skipped, 0);
    EXPECT_LT(skipped, config.steps);
    EXPECT_LT(found.reports.back().loss_scale, found.reports.front().loss_scale);
}

INSTANTIATE_TEST_SUITE_P(staged, Pipelines,
                         testing::Values(Layers{2, 2}, Layers{3, 3}, Layers{4, 2}, Layers{4, 4}),
                         testing::PrintToStringParamName());

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

// Four ranks, of which two share a host.
class OfHosts : public Ranks {
protected:
    int ranks() const override { return 4; }
    void SetUp() override {
        Ranks::SetUp();
        if (Ranks::config().device != DeviceKind::cpu) GTEST_SKIP() << "no kernels there";
    }
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
            config.swap.chunk_elements = 8192;
            config.model.hidden = 64;
            config.model.intermediate = 160;
            config.model.head_dim = 32;
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
            config.zero.secondary_shard = SecondShard::none;
            config.zero.compress.weights = weights;
            config.model.tie_embeddings = tied;
            config.precision = tied ? DType::f32 : DType::bf16;
            const Outcome first = run(config, ranks());
            config.zero.secondary_shard = SecondShard::node;
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
    config.zero.secondary_shard = SecondShard::node;
    expect_equal(run(config, ranks()), first);
}

TEST_F(OfHosts, MoveInAStepWhatTheBoundCounts) {
    Config config = this->config();
    config.zero.stage = 3;
    config.zero.secondary_shard = SecondShard::node;
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

// ---------------------------------------------------------------- batches of the program's own

LoadBatch from_file(const TokenLoader& loader, int64_t sequence) {
    return [&loader, sequence](const FedBatch& batch) {
        const auto length = static_cast<size_t>(sequence);
        for (size_t i = 0; i * length < batch.tokens.size(); ++i) {
            const MicroBatch out{.tokens = batch.tokens.subspan(i * length, length),
                                 .targets = batch.targets.subspan(i * length, length)};
            const auto number = static_cast<int64_t>(i);
            batch.step > 0 ? loader.fill(batch.step, number, out)
                           : loader.fill_evaluation(number, out);
        }
    };
}

TEST_F(Ranks, FedByTheirProgramGiveTheBitsOfTheFile) {
    Config config = this->config();
    const TokenLoader loader({.path = config.data.tokens,
                              .sequence = config.batch.sequence,
                              .micro_batch = config.batch.micro_batch,
                              .micro_batches = config.batch.micro_batches,
                              .model_vocab = config.model.vocab,
                              .held_back = config.data.held_back,
                              .evaluation_micro_batches = config.evaluate.micro_batches,
                              .seed = config.seed});
    const auto fed = [&](Runtime& runtime, std::unique_ptr<comm::Communicator> others) {
        runtime = with(std::move(runtime), {.ranks = std::move(others)});
        runtime.load_batch = from_file(loader, config.batch.sequence);
    };
    for (const int64_t parts : {1, 2}) {
        config.parallel.sequence = parts;
        config.zero.stage = parts == 1 ? 3 : 1;
        Config unnamed = config;
        unnamed.data.tokens = "";
        expect_equal(run(unnamed, 2, fed), run(config, 2));
    }
}

TEST_F(Ranks, AreFedTheSameOrEnd) {
    const Config config = this->config();
    const auto said_by = [&](const std::function<void(int, const FedBatch&)>& load) {
        std::vector<std::string> said(2);
        comm::on_run_ranks(2, [&](std::unique_ptr<comm::Communicator> others, Executor& executor) {
            const int rank = others->rank();
            Runtime runtime = with({.executor = &executor}, {.ranks = std::move(others)});
            runtime.load_batch = [&load, rank](const FedBatch& batch) {
                std::ranges::fill(batch.tokens, 1);
                std::ranges::fill(batch.targets, 2);
                load(rank, batch);
            };
            const auto engine = Engine::make(config, std::move(runtime));
            try {
                engine->step();
            } catch (const Error& error) {
                said[static_cast<size_t>(rank)] = error.what();
            }
        });
        return said;
    };
    if (comm::ranks_launched() > 0) GTEST_SKIP() << "threads of one process alone tell all";
    for (const std::string& each :
         said_by([](int rank, const FedBatch&batch) { batch.tokens[3] = rank; }))
        EXPECT_THAT(each, testing::HasSubstr("the fed batch of step 1"));
    const std::vector<std::string> said = said_by([](int rank, const FedBatch&) {
        if (rank == 1) throw Error(Trouble::usage, {.what = "no more text"});
    });
    EXPECT_THAT(said[1], testing::HasSubstr("no more text"));
    EXPECT_THAT(said[0], testing::HasSubstr("rank 1"));
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

// ---------------------------------------------------------------- before they run

// The bound's arithmetic, which knows no schedule, against what is recorded.
TEST_F(Ranks, MoveInAStepWhatTheBoundCounts) {
    Config config = this->config();
    config.freeze = {"*embed_tokens*", "*layers.0.*"};  // no backward pass through either
    for (const int ranks : {2, 3}) {
        for (const int64_t stage : {0, 1, 2, 3}) {
            config.zero.stage = stage;
            config.zero.compress = {
                .gradients = ranks == 2 ? CodecKind::int4 : CodecKind::none,
                .weights = stage == 3 && ranks == 2 ? CodecKind::int8 : CodecKind::none};
            const planner::Plan plan = Predictor::make(config, {.ranks = ranks, .on_a_host = ranks})
                                           ->plan(request_of(config));
            const double least = cost::comm_traffic(plan.layers, plan.partition, plan.compute,
                                                    plan.wire, Exchanged::gradients)
                                     .bytes();
            EXPECT_GT(least, 0);
            for (const ScheduleBytes& schedule : schedule_bytes(plan)) {
                if (schedule.name != "after a step without speculation") continue;
                EXPECT_EQ(schedule.bytes[static_cast<size_t>(swap::Lane::comm)], least)
                    << ranks << " ranks, stage " << stage;
            }
        }
    }
}

TEST_F(Ranks, MoveInAStepOfMomentumWhatTheBoundCounts) {
    Config config = this->config();
    config.optimizer.method = optim::Method::onebit_adam;
    config.optimizer.freeze_step = 1;
    for (const int64_t stage : {0, 1, 2, 3}) {
        config.zero.stage = stage;
        const auto predictor = Predictor::make(config, {.ranks = 3, .on_a_host = 3});
        const planner::Plan plan = predictor->plan(request_of(config));
        int64_t bytes = 0;
        const swap::Schedule step =
            record_step(plan, Previous::not_speculative, false, Exchanged::momentum);
        for (const swap::Task& task : step.tasks)
            bytes += task.lane == swap::Lane::comm ? task.bytes : 0;
        EXPECT_EQ(bytes, cost::comm_traffic(plan.layers, plan.partition, plan.compute, plan.wire,
                                            Exchanged::momentum)
                             .bytes())
            << "stage " << stage;
        // A slow network: the bound of a step of gradients, which are more, is none of this one.
        cost::Measurements measurements = predictor->assumed(plan);
        measurements.comm_bytes_per_s = 1e3;
        const Prediction slow =
            predictor->predict(request_of(config), plan, measurements, Exchanged::momentum);
        EXPECT_EQ(slow.bound_link, cost::Link::comm);
        EXPECT_DOUBLE_EQ(slow.bound_seconds, static_cast<double>(bytes) / 1e3);
        EXPECT_GE(slow.timeline.step_seconds, slow.bound_seconds);
    }
}

// A link so slow that nothing else matters sets the prediction, its bound and any placement's.
TEST_F(Ranks, AreTheLinkThatBindsWhereItIsSlow) {
    Config config = this->config();
    const auto predictor = Predictor::make(config, {.ranks = 2, .on_a_host = 2});
    const planner::Plan plan = predictor->plan(request_of(config));
    cost::Measurements measurements = predictor->assumed(plan);
    const auto step = [&](double bytes_per_s, double overhead_s) {
        measurements.comm_bytes_per_s = bytes_per_s;
        measurements.comm_overhead_s = overhead_s;
        return predictor->predict(request_of(config), plan, measurements);
    };
    EXPECT_NE(step(1e15, 0).binding().link, cost::Link::comm);
    const Prediction slow = step(1e3, 0);
    const double bytes = cost::comm_traffic(plan.layers, plan.partition, plan.compute, plan.wire,
                                            Exchanged::gradients)
                             .bytes();
    EXPECT_EQ(slow.binding().link, cost::Link::comm);
    EXPECT_EQ(slow.bound_link, cost::Link::comm);
    EXPECT_DOUBLE_EQ(slow.bound_seconds, bytes / 1e3);
    EXPECT_DOUBLE_EQ(slow.binding().seconds, slow.bound_seconds);
    EXPECT_GE(slow.timeline.step_seconds, slow.bound_seconds);
    // Calls that take long bind as well, and no placement is to blame for them.
    const Prediction late = step(1e15, 10);
    EXPECT_EQ(late.binding().link, cost::Link::comm);
    EXPECT_NE(late.bound_link, cost::Link::comm);
    EXPECT_GE(late.timeline.step_seconds, late.binding().seconds);
}

// ---------------------------------------------------------------- what goes wrong

// Each rank's error where one of them fails, or where they do not belong together.
std::vector<Problem> problems(int ranks, const std::function<Config(int)>& config,
                              const std::function<void(int, Engine&)>& then = {}) {
    std::vector<Problem> found;
    const auto body = [&](comm::Communicator& others, Executor& executor) {
        const int rank = others.rank();
        const auto engine = Engine::make(
            config(rank), with({.executor = &executor}, {.ranks = comm::borrow(others)}));
        if (then) then(rank, *engine);
    };
    for (const std::exception_ptr& error :
         comm::outcomes_of({.size = ranks, .threads = true}, body)) {
        found.emplace_back();
        if (!error) continue;
        try {
            std::rethrow_exception(error);
        } catch (const Error& why) {
            found.back() = why.problem();
        } catch (const std::exception& why) {
            found.back() = {.what = why.what()};
        }
    }
    return found;
}

TEST_F(Ranks, HaveNoBoundWhereSomeStepsExchangeMomentum) {
    Config config = this->config();
    if (config.device != DeviceKind::cpu) GTEST_SKIP() << "no kernels there";
    config.steps = 4;
    for (const auto method : {optim::Method::adamw, optim::Method::onebit_adam}) {
        config.optimizer.method = method;
        config.optimizer.freeze_step = method == optim::Method::adamw ? 0 : 1;
        const auto measure = [&](int, Engine& engine) {
            engine.measure_bound();
            const RunReport report = engine.report();
            EXPECT_GT(report.predicted_seconds, 0);
            EXPECT_EQ(report.bound_seconds > 0, method == optim::Method::adamw);
        };
        for (const Problem& problem : problems(
                 2, [&](int) { return config; }, measure))
            EXPECT_EQ(problem.what, "");
    }
}

TEST_F(Ranks, NameTheOneThatWasStartedOtherwiseAndTheKey) {
    const auto differing = [&](const std::function<void(Config&)>& change) {
        const auto found = problems(3, [&](int rank) {
            Config mine = config();
            if (rank == 2) change(mine);
            return mine;
        });
        for (const Problem& problem : found) EXPECT_EQ(problem.where, found[0].where);
        return found[0].where;
    };
    EXPECT_EQ(differing([](Config& c) { c.optimizer.lr = 0.5; }), "optimizer.lr on rank 2");
    EXPECT_EQ(differing([](Config& c) { c.zero.stage = 1; }), "zero.stage on rank 2");
    EXPECT_EQ(differing([](Config& c) { c.budgets.host_bytes = kGiB; }), "budgets.host on rank 2");
    EXPECT_EQ(differing([](Config& c) { c.optimizer.beta2 = 0.5; }), "optimizer.betas on rank 2");
}

// Nothing that a user can set differently is left by then; a bug that lets plans differ would hang.
TEST(PlansOfRanks, AreRefusedWhereTheyExchangeInAnotherOrder) {
    const auto said = comm::outcomes_of(
        {.size = 3, .threads = true}, [](comm::Communicator& ranks, Executor& executor) {
            swap::Schedule step;
            for (const int64_t bytes : {int64_t{8}, int64_t{ranks.rank() == 1 ? 24 : 16}}) {
                step.lanes[static_cast<size_t>(swap::Lane::comm)].push_back(
                    static_cast<uint32_t>(step.tasks.size()));
                step.tasks.push_back({.lane = swap::Lane::comm, .bytes = bytes});
            }
            const swap::Schedule* const all[] = {&step};
            require_same_exchanges(ranks, executor, all, false);
        });
    for (const std::exception_ptr& error : said) {
        ASSERT_TRUE(error);
        try {
            std::rethrow_exception(error);
        } catch (const Error& why) {
            EXPECT_EQ(why.trouble(), Trouble::usage);
            EXPECT_EQ(why.problem().where, "the plan: the order of the exchanges on rank 1");
        }
    }
}

// Two stages that both take over before they pass on; or one of them does.
TEST(PlansOfRanks, AreRefusedWhereStagesWaitForEachOther) {
    for (const bool both : {true, false}) {
        const auto said = comm::outcomes_of(
            {.size = 2, .threads = true}, [&](comm::Communicator& ranks, Executor& executor) {
                const int stage = ranks.rank();
                swap::Schedule step{.name = "a step"};
                const auto add = [&](cost::Op op, int32_t layer) {
                    step.lanes[static_cast<size_t>(swap::Lane::comm)].push_back(
                        static_cast<uint32_t>(step.tasks.size()));
                    const auto link =
                        stage == 0 ? cost::StageLink::next : cost::StageLink::previous;
                    step.tasks.push_back({.lane = swap::Lane::comm,
                                          .op = static_cast<uint8_t>(op),
                                          .flags = static_cast<uint8_t>(link),
                                          .layer = layer,
                                          .item = 0,
                                          .bytes = 8});
                };
                const int32_t taken = stage == 0 ? 2 : 1, passed = 3 - taken;
                const bool takes_first = both || stage == 1;
                if (takes_first) add(cost::Op::take_over, taken);
                add(cost::Op::pass_on, passed);
                if (!takes_first) add(cost::Op::take_over, taken);
                const swap::Schedule* const all[] = {&step};
                require_stages_end(ranks, executor, all, stage, 2);
            });
        for (const std::exception_ptr& error : said) {
            ASSERT_EQ(error != nullptr, both);
            if (!both) continue;
            try {
                std::rethrow_exception(error);
            } catch (const Error& why) {
                EXPECT_EQ(why.trouble(), Trouble::internal);
                EXPECT_EQ(why.problem().where, "the schedule \"a step\"");
                EXPECT_THAT(why.problem().measured,
                            testing::HasSubstr("stage 0 takes over layer 2, item 0, from stage 1"));
            }
        }
    }
}

TEST_F(Ranks, RefuseAStepThatTheyCannotShare) {
    Config odd = config();
    odd.batch.micro_batches = 5;
    for (const Problem& problem : problems(3, [&](int) { return odd; })) {
        EXPECT_EQ(problem.where, "batch.micro_batches");
        EXPECT_EQ(problem.measured, "5 micro-batches, 3 ranks");
    }
    odd.batch.micro_batches = 6;
    odd.swap.groups = 3;
    for (const Problem& problem : problems(3, [&](int) { return odd; }))
        EXPECT_EQ(problem.where, "swap.groups");
}

// By an error of the engine's caller, who says so or does not.
TEST_F(Ranks, LearnAtOnceThatOneEndsAndWhy) {
    for (const bool says : {true, false}) {
        const auto found = problems(
            3, [&](int) { return config(); },
            [&](int rank, Engine& engine) {
                engine.step();
                if (rank == 1 && says) engine.abandon("its disk is full");
                if (rank == 1) throw std::runtime_error("its disk is full");
                for (int step = 0; step < 100; ++step) engine.step();
            });
        EXPECT_EQ(found[1].what, "its disk is full");
        for (const size_t rank : {size_t{0}, size_t{2}})
            EXPECT_EQ(found[rank].what,
                      std::string("lost rank 1: it ended with an error: ") +
                          (says ? "its disk is full" : "raised between its steps"));
    }
}

TEST_F(Ranks, LearnAtOnceThatOneCannotStart) {
    Config mine = config();
    mine.budgets.nvme = {{.path = directory_.path()}};
    std::ofstream(directory_ / "rank-1") << "where its directory would be";
    const auto start = std::chrono::steady_clock::now();
    const auto found = problems(3, [&](int) { return mine; });
    EXPECT_EQ(found[1].what, "a rank cannot make its directory");
    EXPECT_EQ(found[1].measured, "a file is in its place");
    EXPECT_EQ(found[1].remedy, "move that file away");
    for (const size_t rank : {size_t{0}, size_t{2}})
        EXPECT_EQ(found[rank].what.substr(0, 12), "lost rank 1:") << found[rank].what;
    const double seconds = comm::CommOptions{}.timeout_seconds / 4;
    EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::duration<double>(seconds));
}

TEST_F(Ranks, StopTogetherWhenOneIsAskedTo) {
    std::array<int, 3> stopped_at{};
    const auto found = problems(
        3, [&](int) { return config(); },
        [&](int rank, Engine& engine) {
            int& step = stopped_at[static_cast<size_t>(rank)];
            while (!engine.any(rank == 2 && step == 2)) engine.step(), ++step;
        });
    for (const Problem& problem : found) EXPECT_EQ(problem.what, "");
    EXPECT_EQ(stopped_at, (std::array<int, 3>{2, 2, 2}));
}

}  // namespace
}  // namespace ferry::train
