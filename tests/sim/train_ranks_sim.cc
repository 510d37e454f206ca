// Several ranks in virtual time: exchanges beside kernels and copies, in as many interleavings as
// there are seeds. A schedule that holds by luck alone does not hold here.
//   FERRY_SIM_SEEDS=10000 runs more of them, FERRY_SIM_SEED=77 that one alone.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <map>

#include "swap/schedule.h"
#include "swap/store.h"
#include "tests/support/borrowed_ranks.h"
#include "tests/support/seeds.h"
#include "tests/support/simulated_machine.h"
#include "tests/support/simulated_ranks.h"
#include "tests/support/tiny_run.h"
#include "trace/trace.h"
#include "train/inside.h"

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

    // The outcome of each rank. `recordings`: a trace for each, or none.
    static std::vector<TinyOutcome> simulate(const Config& config, uint64_t seed,
                                             std::span<trace::Recording> recordings = {},
                                             int size = kRanks) {
        std::vector<TinyOutcome> outcomes(static_cast<size_t>(size));
        comm::run_ranks(
            {.size = size, .seed = seed}, [&](comm::Communicator& ranks, Executor& executor) {
                const auto rank = static_cast<size_t>(ranks.rank());
                aio::SimulatedDisk disk(
                    {.seed = seed * static_cast<uint64_t>(size) + rank, .odds = {.stall = 0.01}},
                    executor);
                outcomes[rank] = run_tiny(
                    config, with({.executor = &executor, .open_volume = volumes_on(disk)},
                                 {.recording = recordings.empty() ? nullptr : &recordings[rank],
                                  .ranks = comm::borrow(ranks)}));
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
        config.swap.speculate = seed % 5 < 3 ? Speculate::all : Speculate::off;
        for (const TinyOutcome& outcome : simulate(config, seed)) {
            EXPECT_EQ(outcome.hash, expected.hash);
            EXPECT_EQ(outcome.losses, expected.losses);
        }
        if (HasFailure()) return;
    } while (seeds.next());
}

TEST_F(RanksSim, EveryInterleavingOfStagesEndsWithTheSameBits) {
    for (const bool tied : {false, true}) {
        const auto staged = [&](Config config) {
            config.parallel.pipeline = kRanks;
            config.model.layers = 3;
            config.model.tie_embeddings = tied;
            return config;
        };
        const TinyOutcome expected = simulate(staged(config(false)), 1).front();
        Seeds seeds(30);
        do {
            const uint64_t seed = seeds.now();
            SCOPED_TRACE("FERRY_SIM_SEED=" + std::to_string(seed));
            Config config = staged(this->config(seed % 3 == 0));
            config.zero.stage = static_cast<int64_t>(seed % 3);
            config.swap.groups = 1 + static_cast<int64_t>(seed / 4 % 2);
            if (seed % 7 == 0) config.swap.groups = 4;
            config.swap.speculate = seed % 5 < 3 ? Speculate::all : Speculate::off;
            constexpr std::array kSchedules{PipelineSchedule::one_f_one_b,
                                            PipelineSchedule::zero_bubble,
                                            PipelineSchedule::automatic};
            config.parallel.schedule = kSchedules[seed % kSchedules.size()];
            for (const TinyOutcome& outcome : simulate(config, seed)) {
                EXPECT_EQ(outcome.hash, expected.hash);
                EXPECT_EQ(outcome.losses, expected.losses);
            }
            if (HasFailure()) return;
        } while (seeds.next());
    }
}

// Stages of two ranks each, which pass a tied table's shards at stage 3 and gather their weights
// for each group.
TEST_F(RanksSim, EveryInterleavingOfStagesOfSeveralRanksEndsWithTheSameBits) {
    constexpr int kStages = 2, kAll = kStages * kRanks;
    const auto staged = [&](Config config) {
        config.parallel.pipeline = kStages;
        config.model.layers = 3;
        config.model.tie_embeddings = true;
        return config;
    };
    const TinyOutcome expected = simulate(staged(config(false)), 1, {}, kAll).front();
    Seeds seeds(24);
    do {
        const uint64_t seed = seeds.now();
        SCOPED_TRACE("FERRY_SIM_SEED=" + std::to_string(seed));
        Config config = staged(this->config(seed % 3 == 0));
        config.zero.stage = seed % 4 == 0 ? 1 : 3;
        config.swap.groups = 1 + static_cast<int64_t>(seed / 4 % 2);
        config.swap.speculate = seed % 5 < 3 ? Speculate::all : Speculate::off;
        for (const TinyOutcome& outcome : simulate(config, seed, {}, kAll)) {
            EXPECT_EQ(outcome.hash, expected.hash);
            EXPECT_EQ(outcome.losses, expected.losses);
        }
        if (HasFailure()) return;
    } while (seeds.next());
}

// Compares the exposed seconds of the report with the slices of the trace.
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
            EXPECT_EQ(link.lane, swap::name_of(swap::Lane::comm));
            EXPECT_NEAR(link.busy_seconds, static_cast<double>(busy) * 1e-9, 1e-12);
            EXPECT_NEAR(link.exposed_seconds, static_cast<double>(busy - beside) * 1e-9, 1e-12);
            EXPECT_GT(beside, 0);
            EXPECT_GT(busy, beside);
        }
    }
}

// ---------------------------------------------------------------- schedules that are wrong

// Two gathers: of what a kernel has made, and of what the first one brought; a kernel then looks at
// what the second one brought. `waits`: whether each of them waits for the one before.
class Chain final : public swap::Kernels, public swap::Collectives {
public:
    struct Waits {
        bool gather_again = true, look = true;
    };

    Chain(comm::Communicator& ranks, Executor& executor, const Waits& waits)
        : ranks_(ranks), executor_(executor), device_(Device::open(DeviceKind::cpu, executor)) {
        device_->reserve(3 * kBytes * ranks.size());
        swap::Task make{.lane = swap::Lane::compute, .op = kMake};
        make.places[0] = buffer(0);
        add(make, false);
        add(gather(0, 1), true);
        add(gather(1, 2), waits.gather_again);
        swap::Task look{.lane = swap::Lane::compute, .op = kLook};
        look.places[0] = buffer(2);
        add(look, waits.look);
        swap::prove_acyclic(schedule_);
    }

    // Whether what was seen is what all ranks made.
    bool holds() {
        const auto store =
            swap::Store::make({.collectives = this}, executor_, *device_, nullptr, *this);
        store->append(schedule_, 1, 1);
        store->drain();
        return seen_;
    }

    void run(const swap::Call& call) noexcept override {
        const int64_t bytes = kBytes * ranks_.size();
        if (call.task->op == kMake) {
            std::fill_n(call.at[0], bytes, kMade);
        } else {
            seen_ =
                std::all_of(call.at[0], call.at[0] + bytes, [](std::byte b) { return b == kMade; });
        }
    }
    std::string describe(const swap::Call&) const override { return "a kernel"; }

    void start(const swap::Call& call) override {
        const comm::Gather piece{call.at[0] + ranks_.rank() * kBytes, call.at[1], kBytes};
        ranks_.all_gather({&piece, 1}, {.of = "weights"});
    }
    void signal(std::atomic<uint64_t>& counter) override { ranks_.signal(counter); }
    void check() override { ranks_.check(); }

private:
    static constexpr int64_t kBytes = 64;  // of a rank
    static constexpr std::byte kMade{7};
    static constexpr uint8_t kMake = 0, kLook = 1;

    swap::OperandPlace buffer(int64_t i) const {
        return {.kind = swap::OperandPlace::Kind::device, .offset = i * kBytes * ranks_.size()};
    }
    swap::Task gather(int64_t from, int64_t to) const {
        swap::Task task{.lane = swap::Lane::comm};
        task.places[0] = buffer(from);
        task.places[1] = buffer(to);
        return task;
    }
    void add(swap::Task task, bool waits) {
        auto& lane = schedule_.lanes[static_cast<size_t>(task.lane)];
        task.index = static_cast<uint32_t>(lane.size());
        if (waits) {
            const swap::Task& before = schedule_.tasks.back();
            task.first_wait = static_cast<uint32_t>(schedule_.waits.size());
            task.waits = 1;
            schedule_.waits.push_back({before.lane, before.index});
        }
        lane.push_back(static_cast<uint32_t>(schedule_.tasks.size()));
        schedule_.tasks.push_back(task);
    }

    comm::Communicator& ranks_;
    Executor& executor_;
    std::unique_ptr<Device> device_;
    swap::Schedule schedule_{};
    bool seen_ = false;
};

// The number of 50 interleavings in which some rank saw something else.
int wrong_of(const Chain::Waits& waits) {
    int wrong = 0;
    for (uint64_t seed = 1; seed <= 50; ++seed) {
        std::array<bool, 3> holds{};
        comm::run_ranks(
            {.size = 3, .seed = seed}, [&](comm::Communicator& ranks, Executor& executor) {
                holds[static_cast<size_t>(ranks.rank())] = Chain(ranks, executor, waits).holds();
            });
        wrong += std::ranges::count(holds, false) > 0;
    }
    return wrong;
}

TEST(SimulatedRanks, ShowWhatASchedulesWaitsAreFor) {
    EXPECT_EQ(wrong_of({}), 0);
    EXPECT_GT(wrong_of({.look = false}), 25);
    // Which sends what has not arrived yet: the ranks themselves refuse that.
    testing::FLAGS_gtest_death_test_style = "threadsafe";
    EXPECT_DEATH(wrong_of({.gather_again = false}), "what leaves was changed");
}

}  // namespace
}  // namespace ferry::train
