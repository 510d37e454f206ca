// Whole training steps in virtual time, on a disk that goes wrong: every run ends with the bits of
// the run in memory, or with a named error. A failing run prints its seed.
//   FERRY_SIM_SEEDS=10000 runs more of them, FERRY_SIM_SEED=77 that one alone.
#include <gtest/gtest.h>

#include <optional>

#include "base/threads.h"
#include "tests/support/plan_for.h"
#include "tests/support/seeds.h"
#include "tests/support/simulated_machine.h"
#include "tests/support/tiny_run.h"
#include "train/step/step.h"

namespace ferry::train {
namespace {

struct SimulatedOutcome : Ended {
    std::optional<int64_t> lost_step{};  // as the volume says
    uint64_t trace = 0;
    int64_t injected = 0;
};

class TrainSim : public testing::Test {
protected:
    static void SetUpTestSuite() {
        data_ = new TinyData;
        reference_ = run_in_memory(tiny_config(*data_));
    }
    static void TearDownTestSuite() { delete data_; }

    static SimulatedOutcome run_on(SimulatedMachine& machine, const Config& config) {
        SimulatedOutcome outcome{machine.run(config)};
        outcome.lost_step = machine.disk().lost_step();
        outcome.trace = machine.disk().trace();
        outcome.injected = machine.disk().injected_of([](aio::Fault) { return true; });
        return outcome;
    }

    static SimulatedOutcome simulate(const Config& config, const aio::SimulatedDiskOptions& options,
                                     bool again = false) {
        SimulatedMachine machine(options);
        SimulatedOutcome outcome = run_on(machine, config);
        if (again && !outcome.error.empty()) {
            machine.disk().heal();
            expect_exact(run_on(machine, config));
        }
        return outcome;
    }

    static void expect_exact(const SimulatedOutcome& outcome) {
        EXPECT_EQ(outcome.error, "");
        EXPECT_FALSE(outcome.lost_step);
        EXPECT_EQ(outcome.hash, reference_.hash);
        EXPECT_EQ(outcome.losses, reference_.losses);
    }
    static void expect_exact_or_named(const SimulatedOutcome& outcome) {
        if (outcome.error.empty()) return expect_exact(outcome);
        EXPECT_EQ(outcome.trouble, Trouble::io) << outcome.error;
    }

    // The path and the offset of a failed transfer, or of bytes that came back wrong.
    static bool names_the_place(const SimulatedOutcome& outcome) {
        return outcome.trouble == Trouble::io && outcome.says("simulated");
    }

    // For a run whose state was there: its volume names the step that its error does.
    static void expect_step_named(const SimulatedOutcome& outcome) {
        ASSERT_TRUE(outcome.lost_step);
        const std::string step = std::to_string(*outcome.lost_step);
        const std::string next = std::to_string(*outcome.lost_step + 1);
        EXPECT_TRUE(outcome.says("the last good step is " + step)) << outcome.error;
        EXPECT_TRUE(outcome.says(", in step " + next) || outcome.says(", after step " + step))
            << outcome.error;
        const bool transfer = outcome.says("read failed") || outcome.says("write failed") ||
                              outcome.says("read back");
        EXPECT_TRUE(!transfer || outcome.says(", of layer ")) << outcome.error;
    }

    static TinyData* data_;
    static Ended reference_;
};
TinyData* TrainSim::data_ = nullptr;
Ended TrainSim::reference_;

TEST_F(TrainSim, UsesEveryTierAndBothOutcomesOfSpeculation) {
    const SimulatedOutcome outcome = simulate(tiny_config_on_nvme(*data_), {.seed = 1});
    expect_exact(outcome);
    EXPECT_GT(outcome.report.steps_committed, 0);
    EXPECT_GT(outcome.report.steps_rolled_back, 0);
    const std::vector<LinkReport>& links = outcome.report.links;
    for (size_t i = 0; i < links.size(); ++i) {
        const auto lane = static_cast<swap::Lane>(i);
        EXPECT_EQ(links[i].lane, swap::name_of(lane));
        const bool moves = lane != swap::Lane::compute && lane != swap::Lane::team;
        EXPECT_TRUE(!moves || links[i].bytes > 0) << links[i].lane;
    }
}

// In every variant, counted bytes are the recorded ones. Every task that moves bytes says how many,
// and of which layer where they are stored.
TEST_F(TrainSim, CountedBytesAreThoseOfTheSchedules) {
    const planner::Plan plan = plan_for(tiny_config_on_nvme(*data_));
    const auto expect_counted = [](const swap::Schedule& schedule, const LaneBytes& counted) {
        LaneBytes recorded{};
        for (const swap::Task& task : schedule.tasks) {
            recorded[static_cast<size_t>(task.lane)] += task.bytes;
            const bool only_decides =
                task.verb == swap::Verb::commit || task.verb == swap::Verb::rollback;
            EXPECT_EQ(task.bytes == 0, only_decides) << schedule.name << ": " << name_of(task.verb);
            EXPECT_TRUE(task.layer >= 0 || task.object == swap::kNoObject);
        }
        EXPECT_EQ(recorded, counted) << schedule.name;
    };
    for (int p = 0; p < kPrevious; ++p) {
        const auto previous = static_cast<Previous>(p);
        for (const bool speculative : {false, true})
            expect_counted(record_step(plan, previous, speculative),
                           step_bytes(plan, previous, speculative));
        expect_counted(record_drain(plan, previous), drain_bytes(plan, previous));
    }
}

// The run reserves what its plan says, to the byte. Headers lie beside the volume's slots; maps of
// durable steps are planned with a page more each.
TEST_F(TrainSim, TakesAsMuchOfEveryTierAsItsPlanSays) {
    for (const bool durable : {false, true}) {
        Config config = tiny_config_on_nvme(*data_);
        config.checkpoint.durable_steps = durable;
        if (durable) config.swap.state_on_nvme = 1;
        const planner::Plan plan = plan_for(config);
        const Reserved took = SimulatedMachine({.seed = 1}).run(config).report.reserved;
        EXPECT_EQ(took.device_bytes, plan.device_bytes);
        EXPECT_EQ(took.host_bytes, plan.host_bytes);
        int64_t planned = 0, stored = 0;
        for (const planner::TierRow& row : plan.rows) {
            if (row.tier != swap::Tier::nvme || row.kind == planner::RowKind::headers) continue;
            planned += row.bytes;
            stored += row.kind == planner::RowKind::fresh_slots ? 0 : row.bytes;
        }
        EXPECT_EQ(took.nvme_bytes, planned - (durable ? 2 * 4096 : 0));
        EXPECT_LE(took.nvme_peak_bytes, took.nvme_bytes);
        EXPECT_GT(took.nvme_peak_bytes, stored);  // fresh slots were in use too
    }
}

// The first gradients overflow: speculative updates on them are taken back, wherever the state
// lies.
TEST_F(TrainSim, SkippedStepsOfFp16AreTheSameOnEveryTier) {
    const auto steep = [](Config config) {
        config.precision = DType::f16;
        config.batch = {.sequence = 1, .micro_batch = 1, .micro_batches = 2};
        config.model.norm_eps = 1e-30;
        config.clip_norm = 1e6;
        return config;
    };
    const Ended memory = run_in_memory(steep(tiny_config(*data_)));
    const SimulatedOutcome tiers = simulate(steep(tiny_config_on_nvme(*data_)), {.seed = 5});
    EXPECT_EQ(tiers.error, "");
    EXPECT_GT(memory.report.skipped_steps, 0);
    EXPECT_LT(memory.report.skipped_steps, memory.report.steps);
    EXPECT_EQ(tiers.report.skipped_steps, memory.report.skipped_steps);
    EXPECT_EQ(tiers.hash, memory.hash);
    EXPECT_EQ(tiers.losses, memory.losses);
}

TEST_F(TrainSim, TheSameSeedIsTheSameRun) {
    const aio::SimulatedDiskOptions options{.seed = 9, .odds = {.shorten = 0.1, .again = 0.1}};
    const Config config = tiny_config_on_nvme(*data_);
    EXPECT_EQ(simulate(config, options).trace, simulate(config, options).trace);
}

TEST_F(TrainSim, GetsOverEveryHiccup) {
    Seeds seeds(500);
    do {
        const uint64_t seed = seeds.now();
        SCOPED_TRACE("FERRY_SIM_SEED=" + std::to_string(seed));
        Config config = tiny_config_on_nvme(*data_);
        config.swap.speculate = seed % 3 == 0   ? Speculate::automatic
                                : seed % 3 == 1 ? Speculate::all
                                                : Speculate::off;
        config.swap.groups = 1 + static_cast<int64_t>(seed % 2);
        config.swap.state_on_device = seed % 5 < 2 ? 1 : 0;
        config.budgets.host_bytes = (112 + static_cast<int64_t>(seed * 37 % 300)) * kKiB;
        config.budgets.device_bytes = (280 + static_cast<int64_t>(seed * 53 % 300)) * kKiB;
        const SimulatedOutcome outcome = simulate(config, {.seed = seed,
                                                           .odds = {.shorten = 0.05,
                                                                    .interrupt = 0.05,
                                                                    .again = 0.02,
                                                                    .stall = 0.01,
                                                                    .partial_submission = 0.1}});
        EXPECT_GT(outcome.injected, 0);
        expect_exact(outcome);
        if (HasFailure()) return;
    } while (seeds.next());
}

// A fault at the n-th transfer it can happen to, for n = 0, 1, 2, ... until the run has no more. A
// hiccup is got over; a loud failure ends the run with the path, the place and what to do; so does
// a silent one, unless nobody reads those bytes again or they are what was there before. Once there
// was a state to lose, error and volume name the step, and the next run on that disk is exact.
class EveryFault : public TrainSim, public testing::WithParamInterface<aio::Fault> {};

TEST_P(EveryFault, AtEveryTransferEndsExactOrNamed) {
    const aio::Fault fault = GetParam();
    const int64_t stride = stride_of(1);
    constexpr int64_t kAgainEvery = 5;  // a run on what this one left
    int64_t named = 0, lost = 0, runs = 0;
    for (int64_t n = 0;; n += stride, ++runs) {
        SCOPED_TRACE("at transfer " + std::to_string(n));
        const SimulatedOutcome outcome =
            simulate(tiny_config_on_nvme(*data_),
                     {.seed = static_cast<uint64_t>(n) + 1, .fault = fault, .fault_at = n},
                     n % kAgainEvery == 0);
        if (outcome.injected == 0) break;
        expect_exact_or_named(outcome);
        named += outcome.error.empty() ? 0 : 1;
        lost += outcome.lost_step ? 1 : 0;
        if (outcome.lost_step) expect_step_named(outcome);
        EXPECT_EQ(outcome.lost_step.has_value(), outcome.says(" step ")) << outcome.error;
        EXPECT_TRUE(outcome.error.empty() || names_the_place(outcome)) << outcome.error;
        if (HasFailure()) return;
    }
    EXPECT_GT(runs, 100 / stride);
    if (aio::loud_failure(fault)) {
        EXPECT_EQ(named, runs);
        EXPECT_GT(lost, 0);
    } else if (aio::silent(fault)) {
        EXPECT_GT(lost, 0);
    } else {
        EXPECT_EQ(named, 0);
    }
}

INSTANTIATE_TEST_SUITE_P(each, EveryFault,
                         testing::Values(aio::Fault::shorten, aio::Fault::interrupt,
                                         aio::Fault::again, aio::Fault::stall, aio::Fault::eio,
                                         aio::Fault::enospc, aio::Fault::erofs, aio::Fault::vanish,
                                         aio::Fault::bit_flip, aio::Fault::lost_write,
                                         aio::Fault::misdirected_write, aio::Fault::torn_write),
                         [](const auto& fault) { return aio::name_of(fault.param); });

// The same with the smallest state, where a weight is half of a version: at some transfers.
TEST_F(TrainSim, FaultsWithASplitMasterEndExactOrNamed) {
    const auto small = [](Config config) {
        config.precision = DType::bf16;
        config.optimizer.moments = MomentType::bf16;
        config.optimizer.master = MasterFormat::split;
        return config;
    };
    const Ended memory = run_in_memory(small(tiny_config(*data_)));
    const Config tight = small(tiny_config_on_nvme(*data_));
    const SimulatedOutcome calm = simulate(tight, {.seed = 1});
    EXPECT_EQ(calm.error, "");
    EXPECT_GT(calm.report.steps_committed, 0);
    EXPECT_GT(calm.report.steps_rolled_back, 0);
    EXPECT_EQ(calm.hash, memory.hash);
    const int64_t stride = stride_of(7);
    for (int kind = 1; kind < aio::kFaults; ++kind) {
        const auto fault = static_cast<aio::Fault>(kind);
        for (int64_t n = kind % stride;; n += stride) {
            SCOPED_TRACE(std::string(aio::name_of(fault)) + " at transfer " + std::to_string(n));
            const SimulatedOutcome outcome = simulate(
                tight, {.seed = static_cast<uint64_t>(n) + 1, .fault = fault, .fault_at = n});
            if (outcome.injected == 0) break;
            if (outcome.error.empty()) {
                EXPECT_FALSE(aio::loud_failure(fault));
                EXPECT_EQ(outcome.hash, memory.hash);
                EXPECT_EQ(outcome.losses, memory.losses);
            } else {
                EXPECT_TRUE(aio::silent(fault) || aio::loud_failure(fault)) << outcome.error;
                EXPECT_TRUE(names_the_place(outcome)) << outcome.error;
            }
            if (HasFailure()) return;
        }
    }
}

// For two steps the disk has a fiftieth of its speed. They take longer; nothing else happens.
TEST_F(TrainSim, ADiskThatIsSlowForAWhileOnlySlowsTheRun) {
    const Config config = tiny_config_on_nvme(*data_);
    constexpr double kSpeed = 3e8;
    SimulatedMachine machine({.seed = 3, .path_bytes_per_s = {kSpeed}});
    std::vector<Nanos> starts;
    const Ended ended = machine.run(config, false, [&](int64_t step) {
        machine.disk().set_path_speed(0, step == 2 || step == 3 ? kSpeed / 50 : kSpeed);
        starts.push_back(machine.now());
    });
    EXPECT_EQ(ended.losses, reference_.losses);
    EXPECT_EQ(ended.hash, reference_.hash);
    const auto took = [&](size_t step) { return starts[step] - starts[step - 1]; };
    EXPECT_GT(std::min(took(2), took(3)), 10 * took(5));
}

// A chunk lies on one path. Enough of them are under way for most paths to be busy, and those
// together are nearly as fast as one drive of their speed (with as few as one drive needs: 0.45).
TEST_F(TrainSim, SeveralPathsAreNearlyAsFastAsOneOfTheirSpeed) {
    Config config = tiny_config(*data_);
    config.model.hidden = 64;
    config.model.layers = 6;
    config.model.intermediate = 256;
    config.budgets.host_bytes = 8 * kMiB;
    config.swap.state_on_nvme = 1;
    constexpr double kSpeed = 1e8;
    constexpr int64_t kPaths = 8;
    const auto seconds_on = [&](int64_t paths) {
        config.budgets.nvme.clear();
        std::vector<double> speeds;
        for (int64_t path = 0; path < paths; ++path) {
            config.budgets.nvme.push_back(
                {.path = "simulated" + std::to_string(path), .size_bytes = 64 * kMiB});
            speeds.push_back(kSpeed / static_cast<double>(paths));
        }
        SimulatedMachine machine({.seed = 3, .latency_ns = 1000, .path_bytes_per_s = speeds});
        const Ended ended = machine.run(config);
        EXPECT_EQ(ended.error, "");
        return ended.report.seconds;
    };
    const double one_s = seconds_on(1), several_s = seconds_on(kPaths);
    EXPECT_LT(several_s, 1.6 * one_s) << one_s;
}

}  // namespace
}  // namespace ferry::train
