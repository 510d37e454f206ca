// Every optimizer through the whole engine: in memory, and through three tiers with speculative
// updates and rolled-back updates, ends with the same bits; and the loss falls.
#include <gtest/gtest.h>

#include <numeric>
#include <set>
#include <utility>

#include "ferry/optim.h"
#include "swap/schedule.h"
#include "tests/support/plan_for.h"
#include "tests/support/simulated_machine.h"
#include "tests/support/tiny_run.h"

namespace ferry::train {
namespace {

struct MethodCase {
    const char* name;
    OptimizerConfig optimizer;
    double state_bytes;  // of an element
};

void PrintTo(const MethodCase& c, std::ostream* out) { *out << c.name; }

const MethodCase kMethods[] = {
    {"adamw", {.method = optim::Method::adamw, .lr = 1e-2, .weight_decay = 0.1}, 12},
    {"adam", {.method = optim::Method::adam, .lr = 1e-2, .weight_decay = 1e-3}, 12},
    {"sgd", {.method = optim::Method::sgd, .lr = 0.3, .weight_decay = 1e-3}, 4},
    {"sgd_momentum",
     {.method = optim::Method::sgd, .lr = 0.1, .weight_decay = 1e-3, .momentum = 0.9},
     8},
    {"sgd_nesterov",
     {.method = optim::Method::sgd, .lr = 0.1, .momentum = 0.9, .nesterov = true},
     8},
    {"lion", {.method = optim::Method::lion, .lr = 3e-3, .beta2 = 0.99, .weight_decay = 0.1}, 8},
    {"adagrad",
     {.method = optim::Method::adagrad,
      .lr = 0.1,
      .eps = 1e-10,
      .weight_decay = 1e-3,
      .initial_accumulator = 0.1},
     8},
    {"adamw_bf16_moments",
     {.method = optim::Method::adamw, .lr = 1e-2, .weight_decay = 0.1, .moments = MomentType::bf16},
     8},
    {"adamw_split",
     {.method = optim::Method::adamw,
      .lr = 1e-2,
      .weight_decay = 0.1,
      .master = MasterFormat::split},
     10},
    {"adamw_split_bf16_moments",
     {.method = optim::Method::adamw,
      .lr = 1e-2,
      .weight_decay = 0.1,
      .moments = MomentType::bf16,
      .master = MasterFormat::split},
     6},
    {"sgd_split",
     {.method = optim::Method::sgd,
      .lr = 0.3,
      .moments = MomentType::bf16,
      .master = MasterFormat::split},
     2},
    {"lion_split_bf16_moments",
     {.method = optim::Method::lion,
      .lr = 3e-3,
      .beta2 = 0.99,
      .moments = MomentType::bf16,
      .master = MasterFormat::split},
     4},
};

constexpr double kScale = 4.0 / 256;  // a moment's, of an element
const MethodCase kCoded[] = {
    {"adamw_int8",
     {.method = optim::Method::adamw, .lr = 1e-2, .weight_decay = 0.1, .moments = MomentType::int8},
     6 + 2 * kScale},
    {"adam_int8",
     {.method = optim::Method::adam, .lr = 1e-2, .moments = MomentType::int8},
     6 + 2 * kScale},
    {"sgd_int8",
     {.method = optim::Method::sgd, .lr = 0.1, .momentum = 0.9, .moments = MomentType::int8},
     5 + kScale},
    {"lion_int8",
     {.method = optim::Method::lion, .lr = 3e-3, .beta2 = 0.99, .moments = MomentType::int8},
     5 + kScale},
    {"adagrad_int8",
     {.method = optim::Method::adagrad,
      .lr = 0.1,
      .eps = 1e-10,
      .initial_accumulator = 0.1,
      .moments = MomentType::int8},
     5 + kScale},
    {"adamw_split_int8",
     {.method = optim::Method::adamw,
      .lr = 1e-2,
      .moments = MomentType::int8,
      .master = MasterFormat::split},
     4 + 2 * kScale},
};

TinyOutcome in_memory(const Config& config) {
    const auto executor = make_thread_executor();
    return run_tiny(config, {.executor = executor.get()});
}

TinyOutcome on_simulated_disk(const Config& config) {
    const auto executor = make_simulated_executor(5);
    aio::SimulatedDisk disk({.seed = 5}, *executor);
    return run_tiny(config, {.executor = executor.get(), .open_volume = volumes_on(disk)});
}

class Methods : public testing::TestWithParam<MethodCase> {
protected:
    static Config with_method(Config config) {
        config.optimizer = GetParam().optimizer;
        if (config.optimizer.moments == MomentType::int8) config = with_coded_moments(config);
        if (config.optimizer.master == MasterFormat::split) config.precision = DType::bf16;
        config.schedule = {
            .kind = optim::Decay::wsd, .warmup_steps = 2, .total_steps = 10, .decay_steps = 3};
        config.steps = 10;
        return config;
    }
    const TinyData data_;
};

TEST_P(Methods, ThreeTiersEndWithTheBitsOfMemory) {
    const Config roomy = with_method(tiny_config(data_));
    Config tight = with_method(tiny_config_on_nvme(data_));
    tight.swap.state_on_nvme = 1;
    ASSERT_EQ(plan_for(tight).state.element_bytes(), GetParam().state_bytes);
    const TinyOutcome reference = in_memory(roomy), stored = on_simulated_disk(tight);
    EXPECT_EQ(stored.hash, reference.hash);
    EXPECT_EQ(stored.losses, reference.losses);
    EXPECT_GT(stored.report.links[size_t(swap::Lane::read)].bytes, 0);
    EXPECT_GT(stored.report.steps_committed, 0);
    EXPECT_GT(stored.report.steps_rolled_back, 0);

    Config chunked = roomy;
    chunked.swap.chunk_elements = 8192;
    chunked.threads = 2;
    EXPECT_EQ(in_memory(chunked).hash, reference.hash);
}

TEST_P(Methods, LossFalls) {
    Config config = with_method(tiny_config(data_));
    config.clip_norm = 0;
    config.steps = config.schedule.total_steps = 80;
    const auto losses = in_memory(config).losses;
    const double before = std::accumulate(losses.begin(), losses.begin() + 10, 0.0) / 10;
    const double after = std::accumulate(losses.end() - 10, losses.end(), 0.0) / 10;
    EXPECT_LT(after, before - 0.1);
}

TEST(MethodsDiffer, EveryOneHasABitPatternAndARecordOfItsOwn) {
    const TinyData data;
    std::set<uint64_t> hashes;
    std::set<std::string> records;
    std::vector<MethodCase> all(std::begin(kMethods), std::end(kMethods));
    all.insert(all.end(), std::begin(kCoded), std::end(kCoded));
    for (const MethodCase& one : all) {
        Config config = tiny_config(data);
        config.optimizer = one.optimizer;
        if (config.optimizer.moments == MomentType::int8) config = with_coded_moments(config);
        if (config.optimizer.master == MasterFormat::split) config.precision = DType::bf16;
        const auto executor = make_thread_executor();
        const auto engine = Engine::make(config, {.executor = executor.get()});
        engine->step();
        hashes.insert(engine->state_hash());
        records.insert(engine->numerics_record());
    }
    EXPECT_EQ(hashes.size(), all.size());
    EXPECT_EQ(records.size(), all.size());
}

INSTANTIATE_TEST_SUITE_P(all, Methods, testing::ValuesIn(kMethods),
                         [](const auto& one) { return std::string(one.param.name); });

INSTANTIATE_TEST_SUITE_P(coded, Methods, testing::ValuesIn(kCoded),
                         [](const auto& one) { return std::string(one.param.name); });

// Which tensors are coded decides numbers: the list is part of the record.
TEST(CodedMoments, OfMoreTensorsAreAnotherRun) {
    const TinyData data;
    Config config = with_coded_moments(tiny_config(data));
    const auto executor = make_thread_executor();
    const auto outcome = [&](std::vector<std::string> fp32) {
        config.optimizer.fp32_moments = std::move(fp32);
        const auto engine = Engine::make(config, {.executor = executor.get()});
        engine->step();
        return std::pair(engine->state_hash(), engine->numerics_record());
    };
    const auto usual = outcome({"*embed_tokens*"}), none = outcome({}),
               more = outcome({"*embed*", "*q_proj*"});
    EXPECT_EQ(std::set({usual.first, none.first, more.first}).size(), 3u);
    EXPECT_EQ(std::set({usual.second, none.second, more.second}).size(), 3u);
    const auto where = [&]() -> std::string {
        try {
            outcome({"*embed*", "*no_such*"});
        } catch (const Error& error) {
            return error.problem().where;
        }
        return "accepted";
    };
    EXPECT_EQ(where(), "optimizer.fp32_moments[1]");
}

// ---------------------------------------------------------------- Muon

struct MuonCase {
    const char* name;
    MomentType moments = MomentType::f32;
    MasterFormat master = MasterFormat::fp32;
    DType precision = DType::f32;
};

void PrintTo(const MuonCase& c, std::ostream* out) { *out << c.name; }

class MuonRuns : public testing::TestWithParam<MuonCase> {
protected:
    Config with_muon(Config config) const {
        config.optimizer = {.method = optim::Method::muon,
                            .lr = 0.02,
                            .weight_decay = 0.1,
                            .momentum = 0.95,
                            .nesterov = true,
                            .adamw_lr = 3e-3,
                            .moments = GetParam().moments,
                            .master = GetParam().master};
        if (GetParam().moments == MomentType::int8) {
            config = with_coded_moments(config);
            config.clip_norm = 2.6;  // in some steps
        }
        config.precision = GetParam().precision;
        config.schedule = {
            .kind = optim::Decay::wsd, .warmup_steps = 2, .total_steps = 10, .decay_steps = 3};
        config.steps = 10;
        return config;
    }
    // A matrix of Muon is a segment of its own, and so of 4,096 elements at least.
    Config tight() const {
        Config config = with_muon(tiny_config_on_nvme(data_));
        config.budgets.host_bytes = 2 * kMiB;
        config.swap.state_on_nvme = 1;
        config.budgets.device_bytes = smallest_device_budget(config);
        return config;
    }
    // The least that the planner asks for: no weights stay there.
    static int64_t smallest_device_budget(Config config) {
        config.budgets.device_bytes = 1;
        try {
            plan_for(config);
        } catch (const Error& error) {
            const std::string& needed = error.problem().measured;  // "... (1048576 bytes)"
            return std::stoll(needed.substr(needed.find('(') + 1));
        }
        return 0;
    }
    const TinyData data_;
};

TEST_P(MuonRuns, ThreeTiersEndWithTheBitsOfMemory) {
    const Config roomy = with_muon(tiny_config(data_));
    const TinyOutcome reference = in_memory(roomy), stored = on_simulated_disk(tight());
    EXPECT_EQ(stored.hash, reference.hash);
    EXPECT_EQ(stored.losses, reference.losses);
    EXPECT_GT(stored.report.links[size_t(swap::Lane::read)].bytes, 0);
    EXPECT_GT(stored.report.steps_committed, 0);
    EXPECT_GT(stored.report.steps_rolled_back, 0);
    Config chunked = roomy;
    chunked.swap.chunk_elements = 8192;
    chunked.threads = 2;
    EXPECT_EQ(in_memory(chunked).hash, reference.hash);
    Config on_device = roomy;  // but for the matrices, which the processors update
    on_device.swap.state_on_device = 1;
    EXPECT_EQ(in_memory(on_device).hash, reference.hash);
}

TEST_P(MuonRuns, LossFalls) {
    Config config = with_muon(tiny_config(data_));
    config.clip_norm = 0;
    config.steps = config.schedule.total_steps = 80;
    const auto losses = in_memory(config).losses;
    const double before = std::accumulate(losses.begin(), losses.begin() + 10, 0.0) / 10;
    const double after = std::accumulate(losses.end() - 10, losses.end(), 0.0) / 10;
    EXPECT_LT(after, before - 0.1);
}

// One matrix is one chunk, with one moment and slots of its size; the rest is cut and has two.
TEST_P(MuonRuns, MatricesAreWholeChunksInSlotsOfTheirSize) {
    const planner::Plan plan = plan_for(tight());
    int64_t matrices = 0;
    for (const planner::Chunk& chunk : plan.chunks) {
        const bool matrix = planner::is_matrix(chunk);
        matrices += matrix;
        EXPECT_EQ(chunk.format.moments, matrix ? 1 : 2);
        EXPECT_EQ(chunk.count, matrix ? round_up(chunk.rows * chunk.cols, optim::kLeaf)
                                      : std::min<int64_t>(chunk.count, 4096));
        const swap::Object& state = plan.objects[chunk.state];
        ASSERT_EQ(state.home, swap::Tier::nvme);
        const aio::SlotClass& slots = plan.slot_classes[static_cast<size_t>(state.slot_class)];
        EXPECT_GE(slots.slot_bytes, state.bytes);
        EXPECT_EQ(slots.name.find(" x ") != std::string::npos, matrix) << slots.name;
        if (matrix) {
            EXPECT_EQ(slots.slot_bytes, state.bytes) << slots.name;
        }
    }
    EXPECT_EQ(matrices, 14);  // q, k, v, o, gate, up, down of two blocks
    EXPECT_GT(plan.workspace_bytes, 0);
}

INSTANTIATE_TEST_SUITE_P(
    all, MuonRuns,
    testing::Values(MuonCase{"fp32"}, MuonCase{"bf16_moments", MomentType::bf16},
                    MuonCase{"int8_moments", MomentType::int8},
                    MuonCase{"split", MomentType::f32, MasterFormat::split, DType::bf16},
                    MuonCase{"split_int8", MomentType::int8, MasterFormat::split, DType::bf16},
                    MuonCase{"split_fp16", MomentType::int8, MasterFormat::split, DType::f16},
                    MuonCase{"fp16", MomentType::f32, MasterFormat::fp32, DType::f16}),
    [](const auto& one) { return std::string(one.param.name); });

// Which tensors are Muon's, and by which iteration, is part of the record. What it cannot do is
// refused.
TEST(Muon, RulesAreAnotherRunOrRefused) {
    const TinyData data;
    Config config = tiny_config(data);
    config.optimizer = {
        .method = optim::Method::muon, .lr = 0.02, .momentum = 0.95, .nesterov = true};
    const auto executor = make_thread_executor();
    const auto outcome = [&](const Config& of) {
        const auto engine = Engine::make(of, {.executor = executor.get()});
        engine->step();
        return std::pair(engine->state_hash(), engine->numerics_record());
    };
    Config fewer = config, longer = config, other = config, narrow = config;
    fewer.optimizer.adamw_tensors = {"*q_proj*"};
    longer.optimizer.ns_steps = 6;
    other.optimizer.ns_coefficients = {1.5, -0.5, 0};
    narrow.optimizer.ns_products = DType::bf16;
    const auto runs = {outcome(config), outcome(fewer), outcome(longer), outcome(other),
                       outcome(narrow)};
    std::set<uint64_t> hashes;
    std::set<std::string> records;
    for (const auto& [hash, record] : runs) hashes.insert(hash), records.insert(record);
    EXPECT_EQ(hashes.size(), runs.size());
    EXPECT_EQ(records.size(), runs.size());

    const auto where = [&](const Config& of) -> std::string {
        try {
            outcome(of);
        } catch (const Error& error) {
            EXPECT_EQ(error.trouble(), Trouble::usage);
            return error.problem().where;
        }
        return "accepted";
    };
    Config nobodys = config, nothing = config, frozen = config;
    nobodys.optimizer.adamw_tensors = {"*no_such*"};
    nothing.optimizer.adamw_tensors = {"*proj*"};
    frozen.freeze = {"*.layers.*"};
    EXPECT_EQ(where(nobodys), "optimizer.adamw_tensors[0]");
    EXPECT_EQ(where(nothing), "freeze, optimizer.adamw_tensors");
    EXPECT_EQ(where(frozen), "freeze, optimizer.adamw_tensors");
}

// The schedule's contradictions are refused before anything is opened.
TEST(Schedules, ThatContradictThemselvesAreRefusedAtTheStart) {
    const TinyData data;
    Config config = tiny_config(data);
    config.schedule = {
        .kind = optim::Decay::wsd, .warmup_steps = 4, .total_steps = 10, .decay_steps = 7};
    const auto executor = make_thread_executor();
    const auto where = [&](auto&& make) -> std::string {
        try {
            make();
        } catch (const Error& error) {
            EXPECT_EQ(error.trouble(), Trouble::usage);
            return error.problem().where;
        }
        return "accepted";
    };
    EXPECT_EQ(where([&] { Engine::make(config, {.executor = executor.get()}); }),
              "schedule.decay_steps");
    EXPECT_EQ(where([&] { plan_for(config); }), "schedule.decay_steps");
}

}  // namespace
}  // namespace ferry::train
