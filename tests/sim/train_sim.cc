// Whole training steps in virtual time, on a disk that goes wrong: every run ends with the bits of
// the run in memory, or with a named error. A failing run prints its seed.
//   FERRY_SIM_SEEDS=10000 runs more of them, FERRY_SIM_SEED=77 that one alone.
#include <gtest/gtest.h>

#include <cstdlib>

#include "tests/support/simulated_disk.h"
#include "tests/support/tiny_run.h"

namespace ferry::train {
namespace {

uint64_t from_environment(const char* name, uint64_t otherwise) {
    const char* text = std::getenv(name);
    return text ? std::strtoull(text, nullptr, 10) : otherwise;
}

struct SimulatedOutcome {
    TinyOutcome run{};
    std::string error{};  // empty: it ended
    Trouble trouble = Trouble::internal;
    uint64_t trace = 0;
    int64_t injected = 0;
};

class TrainSim : public testing::Test {
protected:
    static void SetUpTestSuite() {
        data_ = new TinyData;
        const auto executor = make_thread_executor();
        reference_ = run_tiny(tiny_config(*data_), {.executor = executor.get()});
    }
    static void TearDownTestSuite() { delete data_; }

    static SimulatedOutcome simulate(const Config& config,
                                     const aio::SimulatedDiskOptions& options) {
        const auto executor = make_simulated_executor(options.seed);
        aio::SimulatedDisk disk(options, *executor);
        SimulatedOutcome outcome;
        try {
            outcome.run =
                run_tiny(config, {.executor = executor.get(),
                                  .open_volume = [&](aio::VolumeOptions volume, Executor& e) {
                                      volume.write_once = false;
                                      return aio::open_simulated_volume(std::move(volume), e, disk);
                                  }});
        } catch (const Error& error) {
            outcome.error = error.what();
            outcome.trouble = error.trouble();
        }
        outcome.trace = disk.trace();
        for (int f = 1; f < aio::kFaults; ++f)
            outcome.injected += disk.injected(static_cast<aio::Fault>(f));
        return outcome;
    }

    static void expect_exact(const SimulatedOutcome& outcome) {
        EXPECT_EQ(outcome.error, "");
        EXPECT_EQ(outcome.run.hash, reference_.hash);
        EXPECT_EQ(outcome.run.losses, reference_.losses);
    }
    static void expect_exact_or_named(const SimulatedOutcome& outcome) {
        if (outcome.error.empty()) return expect_exact(outcome);
        EXPECT_EQ(outcome.trouble, Trouble::io) << outcome.error;
    }

    static TinyData* data_;
    static TinyOutcome reference_;
};
TinyData* TrainSim::data_ = nullptr;
TinyOutcome TrainSim::reference_;

TEST_F(TrainSim, UsesEveryTierAndBothOutcomesOfABet) {
    const SimulatedOutcome outcome = simulate(tiny_config_on_nvme(*data_), {.seed = 1});
    expect_exact(outcome);
    EXPECT_GT(outcome.run.report.bets_won, 0);
    EXPECT_GT(outcome.run.report.bets_lost, 0);
    for (const LinkReport& link : outcome.run.report.links) {
        const bool moves = link.link != "compute" && link.link != "team";
        EXPECT_TRUE(!moves || link.bytes > 0) << link.link;
    }
}

// The first gradients overflow: bets on them are taken back, wherever the state lies.
TEST_F(TrainSim, SkippedStepsOfFp16AreTheSameOnEveryTier) {
    const auto steep = [](Config config) {
        config.precision = "fp16";
        config.batch = {.sequence = 1, .micro_batch = 1, .micro_batches = 2};
        config.model.norm_eps = 1e-30;
        config.clip_norm = 1e6;
        return config;
    };
    const auto executor = make_thread_executor();
    const TinyOutcome memory = run_tiny(steep(tiny_config(*data_)), {.executor = executor.get()});
    const SimulatedOutcome tiers = simulate(steep(tiny_config_on_nvme(*data_)), {.seed = 5});
    EXPECT_EQ(tiers.error, "");
    EXPECT_GT(memory.report.skipped_steps, 0);
    EXPECT_LT(memory.report.skipped_steps, memory.report.steps);
    EXPECT_EQ(tiers.run.report.skipped_steps, memory.report.skipped_steps);
    EXPECT_EQ(tiers.run.hash, memory.hash);
    EXPECT_EQ(tiers.run.losses, memory.losses);
}

TEST_F(TrainSim, TheSameSeedIsTheSameRun) {
    const aio::SimulatedDiskOptions options{.seed = 9, .odds = {.shorten = 0.1, .again = 0.1}};
    const Config config = tiny_config_on_nvme(*data_);
    EXPECT_EQ(simulate(config, options).trace, simulate(config, options).trace);
}

TEST_F(TrainSim, GetsOverEveryHiccup) {
    const uint64_t only = from_environment("FERRY_SIM_SEED", 0);
    const uint64_t seeds = from_environment("FERRY_SIM_SEEDS", 500);
    for (uint64_t seed = only ? only : 1; seed <= (only ? only : seeds); ++seed) {
        SCOPED_TRACE("FERRY_SIM_SEED=" + std::to_string(seed));
        Config config = tiny_config_on_nvme(*data_);
        config.swap.bets = seed % 3 == 0 ? "auto" : seed % 3 == 1 ? "all" : "off";
        config.swap.groups = 1 + static_cast<int64_t>(seed % 2);
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
    }
}

TEST_F(TrainSim, EveryFaultAtAnyTransferEndsExactOrNamed) {
    const aio::Fault faults[] = {aio::Fault::eio,        aio::Fault::enospc,
                                 aio::Fault::vanish,     aio::Fault::bit_flip,
                                 aio::Fault::lost_write, aio::Fault::misdirected_write,
                                 aio::Fault::torn_write};
    const Config config = tiny_config_on_nvme(*data_);
    const int64_t stride = static_cast<int64_t>(from_environment("FERRY_SIM_STRIDE", 7));
    for (const aio::Fault fault : faults) {
        int64_t named = 0;
        for (int64_t n = static_cast<int64_t>(fault);; n += stride) {
            SCOPED_TRACE(std::string(aio::name_of(fault)) + " at transfer " + std::to_string(n));
            const SimulatedOutcome outcome = simulate(
                config, {.seed = static_cast<uint64_t>(n) + 1, .fault = fault, .fault_at = n});
            expect_exact_or_named(outcome);
            if (HasFailure()) return;
            if (outcome.injected == 0) break;  // the run has fewer transfers than n
            named += outcome.error.empty() ? 0 : 1;
        }
        EXPECT_GT(named, 0) << aio::name_of(fault);
    }
}

}  // namespace
}  // namespace ferry::train
