// Several ranks in virtual time: exchanges beside kernels and copies, in as many interleavings as
// there are seeds. A schedule that holds by luck alone does not hold here.
//   FERRY_SIM_SEEDS=10000 runs more of them, FERRY_SIM_SEED=77 that one alone.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <map>

#include "tests/support/borrowed_ranks.h"
#include "tests/support/seeds.h"
#include "tests/support/simulated_disk.h"
#include "tests/support/simulated_ranks.h"
#include "tests/support/tiny_run.h"

namespace ferry::train {
namespace {

class RanksSim : public testing::Test {
protected:
    static constexpr int kRanks = 2;

    Config config(bool tiers) const {
        Config config = tiers ? tiny_config_on_nvme(data_) : tiny_config(data_);
        config.batch.micro_batches = 4;
        config.steps = 4;
        if (!tiers) return config;
        config.budgets.host_bytes = kUnlimited;
        config.budgets.device_bytes = kUnlimited;
        config.swap.state_on_nvme = 1;
        return config;
    }

    // Of each rank. `recordings`: a trace for each, or none.
    static std::vector<TinyOutcome> simulate(const Config& config, uint64_t seed,
                                             std::span<trace::Recording> recordings = {}) {
        std::vector<TinyOutcome> outcomes(kRanks);
        comm::run_ranks(
            {.size = kRanks, .seed = seed}, [&](comm::Communicator& ranks, Executor& executor) {
                const auto rank = static_cast<size_t>(ranks.rank());
                aio::SimulatedDisk disk({.seed = seed * kRanks + rank, .odds = {.stall = 0.01}},
                                        executor);
                outcomes[rank] = run_tiny(
                    config, {.executor = &executor,
                             .open_volume =
                                 [&](aio::VolumeOptions volume, Executor& e) {
                                     volume.write_once = false;
                                     return aio::open_simulated_volume(std::move(volume), e, disk);
                                 },
                             .recording = recordings.empty() ? nullptr : &recordings[rank],
                             .ranks = comm::borrow(ranks)});
            });
        return outcomes;
    }

    const TinyData data_;
};

TEST_F(RanksSim, EveryInterleavingEndsWithTheSameBits) {
    const TinyOutcome expected = simulate(config(false), 1).front();
    Seeds seeds(120);
    do {
        const uint64_t seed = seeds.now();
        SCOPED_TRACE("FERRY_SIM_SEED=" + std::to_string(seed));
        Config config = this->config(seed % 3 == 0);
        config.zero.stage = static_cast<int64_t>(seed % 4);
        config.swap.groups = 1 + static_cast<int64_t>(seed / 4 % 2);
        config.swap.bets = seed % 5 < 3 ? "all" : "off";
        for (const TinyOutcome& outcome : simulate(config, seed)) {
            EXPECT_EQ(outcome.hash, expected.hash);
            EXPECT_EQ(outcome.losses, expected.losses);
        }
        if (HasFailure()) return;
    } while (seeds.next());
}

// What the report says no kernel ran beside, against the slices of the trace.
TEST_F(RanksSim, ExposedCommunicationIsThatOfTheTrace) {
    for (const int64_t stage : {0, 3}) {
        std::array<trace::Recording, kRanks> recordings{trace::Recording(100'000),
                                                        trace::Recording(100'000)};
        Config config = this->config(false);
        config.zero.stage = stage;
        const auto outcomes = simulate(config, 7, recordings);
        for (size_t rank = 0; rank < kRanks; ++rank) {
            const trace::Recording& trace = recordings[rank];
            std::map<trace::RowId, std::vector<trace::Slice>> rows;
            trace::RowId comm = 0, compute = 0;
            for (size_t i = 0; i < trace.size(); ++i) {
                rows[trace[i].row].push_back(trace[i]);
                if (trace[i].name == "agree") comm = trace[i].row;
                if (trace[i].name == "forward") compute = trace[i].row;
            }
            ASSERT_EQ(trace.dropped(), 0u);
            ASSERT_NE(comm, compute);
            Nanos busy = 0, beside = 0;
            for (const trace::Slice& slice : rows[comm]) {
                busy += slice.end_ns - slice.begin_ns;
                for (const trace::Slice& kernel : rows[compute])
                    beside += std::max<Nanos>(0, std::min(slice.end_ns, kernel.end_ns) -
                                                     std::max(slice.begin_ns, kernel.begin_ns));
            }
            const LinkReport& link = outcomes[rank].report.links.back();
            EXPECT_EQ(link.link, "comm");
            EXPECT_NEAR(link.busy_seconds, static_cast<double>(busy) * 1e-9, 1e-12);
            EXPECT_NEAR(link.exposed_seconds, static_cast<double>(busy - beside) * 1e-9, 1e-12);
            EXPECT_GT(beside, 0);
            EXPECT_GT(busy, beside);
        }
    }
}

}  // namespace
}  // namespace ferry::train
