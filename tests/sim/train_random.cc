// Whole runs drawn at random: model, numerics, tiers and, of everything that storage can do wrong,
// what happens when. A run ends with the bits of the run in memory, or with an error that says
// what went wrong where. What it left behind says what it is; with durable steps it goes on.
//   FERRY_SIM_SEEDS=10000 runs more of them, FERRY_SIM_SEED=77 that one alone.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdlib>
#include <initializer_list>
#include <map>
#include <random>

#include "planner/planner.h"
#include "swap/objects.h"
#include "tests/support/plan_for.h"
#include "tests/support/seeds.h"
#include "tests/support/simulated_machine.h"
#include "tests/support/tiny_run.h"

namespace ferry::train {
namespace {

using Odds = aio::SimulatedDiskOptions::Odds;

class Lots {
public:
    explicit Lots(uint64_t seed) : numbers_(seed) {}

    int64_t below(int64_t count) {
        return static_cast<int64_t>(numbers_() % static_cast<uint64_t>(count));
    }
    bool one_in(int64_t count) { return below(count) == 0; }
    template <class Value>
    Value one_of(std::initializer_list<Value> values) {
        return values.begin()[below(std::ssize(values))];
    }
    // As likely between 10 and 100 as between 100 and 1,000.
    double log_uniform(double low, double high) {
        const double unit = static_cast<double>(numbers_() >> 11) * 0x1p-53;
        return low * std::pow(high / low, unit);
    }

private:
    std::mt19937_64 numbers_;
};

// ---------------------------------------------------------------- what is run

void draw_numbers(Lots& lots, Config& config) {
    config.model.layers = 1 + lots.below(3);
    config.model.tie_embeddings = lots.one_in(3);
    if (lots.one_in(3)) config.model.hidden = 32, config.model.intermediate = 96;
    config.batch.micro_batch = 1 + lots.below(2);
    config.batch.micro_batches = lots.one_of({2, 4});
    config.precision = lots.one_of({DType::f32, DType::bf16, DType::f16});
    config.optimizer.method = lots.one_of(
        {optim::Method::adamw, optim::Method::adamw, optim::Method::adam, optim::Method::sgd,
         optim::Method::lion, optim::Method::adagrad, optim::Method::muon});
    if (config.optimizer.method == optim::Method::sgd)
        config.optimizer.momentum = lots.one_of({0.0, 0.9});
    if (config.optimizer.method == optim::Method::muon)
        config.optimizer.momentum = 0.95, config.optimizer.nesterov = lots.one_in(2);
    config.optimizer.moments =
        lots.one_of({MomentType::f32, MomentType::bf16, MomentType::int8, MomentType::int8});
    if (config.optimizer.moments == MomentType::int8)  // matrices of 4,096 elements and more
        config.model.hidden = 64, config.model.intermediate = lots.one_of({64, 96});
    if (config.precision != DType::f32)
        config.optimizer.master = lots.one_of({MasterFormat::fp32, MasterFormat::split});
    config.clip_norm = lots.one_of({0.0, 0.1, 0.98, 1e6});   // never, always, in some steps, never
    if (config.precision == DType::f16 && lots.one_in(2)) {  // the first gradients overflow
        config.batch = {.sequence = 1, .micro_batch = 1, .micro_batches = 2};
        config.model.norm_eps = 1e-30;
    }
    const bool needs_a_matrix =
        config.optimizer.method == optim::Method::muon && config.model.layers == 1;
    if (lots.one_in(5) && !needs_a_matrix) config.freeze = {"model.layers.0.*"};
    config.seed = static_cast<uint32_t>(lots.below(1000));
    config.steps = 3 + lots.below(4);
}

// The smallest budgets that do; half of the time one has more to begin with.
void draw_budgets(Lots& lots, Config& config) {
    const auto begin = [&] { return (64 + (lots.one_in(2) ? lots.below(512) : 0)) * kKiB; };
    config.budgets.device_bytes = begin();
    config.budgets.host_bytes = begin();
    for (;;) {
        try {
            if (!plan_for(config).slot_classes.empty()) return;
            config.swap.state_on_nvme = 1;
            config.swap.state_on_device = 0;
        } catch (const Error& error) {
            if (error.trouble() != Trouble::does_not_fit) throw;
            const Problem& problem = error.problem();  // names the smallest that does
            const int64_t needed =
                std::stoll(problem.measured.substr(problem.measured.find('(') + 1));
            (problem.where == "budgets.device" ? config.budgets.device_bytes
                                               : config.budgets.host_bytes) = needed;
        }
    }
}

void draw_tiers(Lots& lots, Config& config, bool durable) {
    const int64_t paths = 1 + lots.below(3);
    for (int64_t p = 0; p < paths; ++p)
        config.budgets.nvme.push_back(
            {.path = "simulated" + std::to_string(p), .size_bytes = 64 * kMiB});
    config.swap.chunk_elements = lots.one_of({4096, 8192});
    if (const int64_t groups = lots.one_of({0, 1, 2}); groups > 0) config.swap.groups = groups;
    config.swap.speculate = lots.one_of({Speculate::off, Speculate::automatic, Speculate::all});
    config.io.block_bytes = int64_t{4096} << lots.below(9);
    config.io.queue_depth = 1 + static_cast<int>(lots.below(8));
    config.checkpoint.durable_steps = durable;
    if (!durable) {
        config.swap.state_on_nvme = lots.one_of<std::optional<double>>({std::nullopt, 0.5, 1.0});
        config.swap.state_on_device =
            lots.one_of<std::optional<double>>({std::nullopt, 0.0, 0.5, 1.0});
        if (config.swap.state_on_nvme == 1) config.swap.state_on_device = 0;
    }
    draw_budgets(lots, config);
}

// ---------------------------------------------------------------- what goes wrong

struct Failure {
    aio::Fault fault;
    double Odds::*odds;
};
constexpr Failure kFailures[] = {{aio::Fault::eio, &Odds::eio},
                                 {aio::Fault::failed_flush, &Odds::failed_flush},
                                 {aio::Fault::enospc, &Odds::enospc},
                                 {aio::Fault::erofs, &Odds::erofs},
                                 {aio::Fault::vanish, &Odds::vanish},
                                 {aio::Fault::bit_flip, &Odds::bit_flip},
                                 {aio::Fault::lost_write, &Odds::lost_write},
                                 {aio::Fault::misdirected_write, &Odds::misdirected_write},
                                 {aio::Fault::torn_write, &Odds::torn_write}};

// Up to three kinds of failures, from a few in the first step to none in all of them.
Odds draw_odds(Lots& lots, const Odds& hiccups) {
    Odds odds = hiccups;
    for (int64_t kinds = lots.below(4); kinds > 0; --kinds) {
        const Failure& failure = kFailures[lots.below(std::ssize(kFailures))];
        const bool rare = failure.fault == aio::Fault::failed_flush;
        odds.*failure.odds = lots.log_uniform(rare ? 0.01 : 1e-4, rare ? 0.2 : 0.03);
    }
    return odds;
}

// As which transfer is about to end the machine stops; below 0: it does not.
int64_t draw_stop(Lots& lots) {
    return lots.one_in(3) ? static_cast<int64_t>(lots.log_uniform(1, 3000)) : -1;
}

// The accidents between steps: a path is slow for a while, a stored bit turns.
class Weather {
public:
    Weather(Lots& lots, const Config& config)
        : path_(static_cast<int>(lots.below(std::ssize(config.budgets.nvme)))),
          slow_from_(lots.one_in(3) ? 1 + lots.below(config.steps) : kNever),
          slow_until_(slow_from_ + 1 + lots.below(2)),
          rots_before_(lots.one_in(8) ? 2 + lots.below(config.steps - 1) : kNever) {}

    void before(int64_t step, aio::SimulatedDisk& disk) {
        if (step == slow_from_) disk.set_path_speed(path_, kSpeed / 50);
        if (step == slow_until_) disk.set_path_speed(path_, kSpeed);
        if (step != rots_before_) return;
        disk.rot();
        rotted_ = true;
    }
    bool rotted() const { return rotted_; }
    bool slow() const { return slow_from_ != kNever; }

    static constexpr double kSpeed = 3e8;

private:
    static constexpr int64_t kNever = 1'000'000;
    int path_;
    int64_t slow_from_, slow_until_, rots_before_;
    bool rotted_ = false;
};

aio::SimulatedDiskOptions draw_disk(Lots& lots, uint64_t seed) {
    aio::SimulatedDiskOptions options = disk_with_hiccups(seed);
    options.path_bytes_per_s.assign(3, Weather::kSpeed);
    options.odds = draw_odds(lots, options.odds);
    options.stop_at = draw_stop(lots);
    options.power_loss = lots.one_in(2);
    return options;
}

// ---------------------------------------------------------------- what must be so

constexpr int64_t kSeedsForCounts = 200;  // fewer need not have met everything

struct Counts {
    std::array<int64_t, aio::kFaults> runs_with{};
    std::map<std::string, int64_t> ends{};

    void add(const aio::SimulatedDisk& disk) {
        for (size_t f = 0; f < aio::kFaults; ++f)
            runs_with[f] += disk.injected(static_cast<aio::Fault>(f)) > 0;
    }
    void print(int64_t seeds) const {
        printf("%ld seeds:", static_cast<long>(seeds));
        for (const auto& [what, count] : ends)
            printf(" %s %ld,", what.c_str(), static_cast<long>(count));
        for (size_t f = 1; f < aio::kFaults; ++f)
            printf(" %s %ld,", name_of(static_cast<aio::Fault>(f)),
                   static_cast<long>(runs_with[f]));
        printf("\n");
    }
    // A good part of each, or the test tests nothing.
    void expect_all(int64_t seeds, std::initializer_list<const char*> wanted) const {
        for (const char* what : wanted)
            EXPECT_GT(ends.contains(what) ? ends.at(what) : 0, seeds / 100) << what;
    }
    void expect_faults(int64_t seeds, std::initializer_list<aio::Fault> without) const {
        for (int f = 1; f < aio::kFaults; ++f) {
            const auto fault = static_cast<aio::Fault>(f);
            if (std::ranges::count(without, fault) > 0) continue;
            EXPECT_GT(runs_with[static_cast<size_t>(f)], seeds / 200) << name_of(fault);
        }
    }
};

// From where the run began.
void expect_the_rest(const Ended& ended, const Ended& whole) {
    const auto from = static_cast<std::ptrdiff_t>(ended.first - 1);
    ASSERT_EQ(ended.error, "");
    EXPECT_EQ(ended.losses, std::vector(whole.losses.begin() + from, whole.losses.end()));
    EXPECT_EQ(ended.norms, std::vector(whole.norms.begin() + from, whole.norms.end()));
    EXPECT_EQ(ended.hash, whole.hash);
}

// The steps that a run finished before its error.
void expect_the_same_so_far(const Ended& ended, const Ended& whole) {
    const auto from = whole.losses.begin() + static_cast<std::ptrdiff_t>(ended.first - 1);
    ASSERT_LE(ended.first - 1 + std::ssize(ended.losses), std::ssize(whole.losses));
    EXPECT_EQ(ended.losses, std::vector(from, from + std::ssize(ended.losses)));
}

// The path, what was done there, and whose bytes these are where they are a layer's.
void expect_named(const Ended& ended) {
    EXPECT_EQ(ended.trouble, Trouble::io) << ended.error;
    EXPECT_TRUE(ended.says("simulated")) << ended.error;
    const bool own = ended.says("flush failed") || ended.says("the record's write failed") ||
                     ended.says("the layout's write failed") || ended.says("reading a record");
    const bool transfer =
        ended.says("read failed") || ended.says("write failed") || ended.says("read back");
    EXPECT_TRUE(own || transfer) << ended.error;
    EXPECT_TRUE(own || ended.says(", of layer ")) << ended.error;
}

bool spills_inputs(const planner::Plan& plan) {
    return std::ranges::any_of(plan.rows, [](const planner::TierRow& row) {
        return row.tier != swap::Tier::device && row.kind == planner::RowKind::block_inputs;
    });
}

// ---------------------------------------------------------------- a seed

class RandomRun {
public:
    RandomRun(uint64_t seed, const TinyData& data, bool durable)
        : lots_(seed), config_(tiny_config(data)) {
        draw_numbers(lots_, config_);
        whole_ = run_in_memory(config_);
        EXPECT_EQ(whole_.error, "");
        draw_tiers(lots_, config_, durable);
        const aio::SimulatedDiskOptions options = draw_disk(lots_, seed);
        hiccups_ = disk_with_hiccups(seed).odds;
        machine_ = std::make_unique<SimulatedMachine>(options);
    }

    // A run; if it fails, what its volume says to the next ones.
    void ordinary(Counts& counts) {
        const Ended ended = live(false, counts);
        expect_exact_or_named(ended, false);
        ++counts.ends[ended.error.empty() ? "exact" : "named"];
        if (ended.error.empty()) return;
        expect_step_named(ended);
        machine_->disk().heal();
        const Ended resumed = machine_->run(config_, true);
        EXPECT_TRUE(resumed.says("cannot be resumed") && resumed.says("not consistent"))
            << resumed.error;
        expect_the_rest(machine_->run(config_), whole_);
    }

    // A run, and what is resumed from it, each with troubles of its own; then one without any.
    void durable(Counts& counts) {
        const int64_t lives = 1 + lots_.below(3);
        for (int64_t life = 0; life < lives; ++life) {
            if (life > 0) trouble_again();
            const Ended ended = live(life > 0, counts);
            if (life > 0 && refused(ended)) {
                expect_may_be_refused(ended);
            } else {
                expect_exact_or_named(ended, life > 0);
            }
            note_durable(ended, life > 0);
            if (testing::Test::HasFailure()) return;
        }
        machine_->disk().heal();
        const Ended last = machine_->run(config_, true);
        if (last.error.empty()) {
            expect_the_rest(last, whole_);
            EXPECT_TRUE(harmed_ || last.first - 1 >= durable_step_) << last.first;
            ++counts.ends[harmed_ ? "went on after harm" : "went on"];
            return;
        }
        expect_may_be_refused(last);
        ++counts.ends[durable_step_ < 0 ? "nothing durable yet" : "refused"];
        EXPECT_EQ(machine_->run(config_, true).error, last.error) << "refusing changed something";
    }

    uint64_t trace() const { return machine_->disk().trace(); }

private:
    Ended live(bool resumes, Counts& counts) {
        Weather weather(lots_, config_);
        const Nanos start = machine_->now();
        Ended ended = machine_->run(config_, resumes,
                                    [&](int64_t step) { weather.before(step, machine_->disk()); });
        constexpr Nanos kHour = 3'600'000'000'000;
        EXPECT_LT(machine_->now() - start, kHour) << "it all but hangs";
        harmed_ |= weather.rotted() || machine_->disk().injected_of(aio::silent) > 0;
        counts.add(machine_->disk());
        counts.ends["speculative updates committed"] += ended.report.steps_committed > 0;
        counts.ends["speculative updates rolled back"] += ended.report.steps_rolled_back > 0;
        counts.ends["skipped a step"] += ended.report.skipped_steps > 0;
        counts.ends["inputs spilled"] += spills_inputs(plan_for(config_));
        counts.ends["slow for a while"] += weather.slow();
        counts.ends["a bit turned"] += weather.rotted();
        counts.ends["stopped"] += !machine_->disk().powered();
        return ended;
    }

    void trouble_again() {
        machine_->disk().heal();
        if (lots_.one_in(8)) {
            machine_->disk().rot();
            harmed_ = true;
        }
        machine_->disk().trouble(draw_odds(lots_, hiccups_), draw_stop(lots_));
    }

    int64_t failures() const { return machine_->disk().injected_of(aio::loud_failure); }

    void expect_exact_or_named(const Ended& ended, bool resumed) {
        const bool failed = failures() > failures_before_ || !machine_->disk().powered();
        failures_before_ = failures();
        if (ended.error.empty()) {
            // The run may resume from the one record that could be read.
            EXPECT_TRUE(!failed || resumed) << "a failure was not noticed";
            return expect_the_rest(ended, whole_);
        }
        EXPECT_TRUE(failed || harmed_) << ended.error;
        expect_the_same_so_far(ended, whole_);
        expect_named(ended);
    }

    // Once there was a state to lose.
    void expect_step_named(const Ended& ended) {
        const std::optional<int64_t> lost = machine_->disk().lost_step();
        EXPECT_EQ(lost.has_value(), ended.says(" step ")) << ended.error;
        EXPECT_TRUE(lost.has_value() || ended.losses.empty()) << ended.error;
        if (!lost) return;
        EXPECT_EQ(*lost, std::ssize(ended.losses)) << ended.error;
        EXPECT_TRUE(ended.says("the last good step is " + std::to_string(*lost))) << ended.error;
    }

    static bool refused(const Ended& ended) { return ended.says("cannot be resumed"); }

    // Only where nothing was durable yet, or something silent happened, is a state not consistent.
    void expect_may_be_refused(const Ended& ended) {
        failures_before_ = failures();
        EXPECT_TRUE(refused(ended)) << ended.error;
        EXPECT_TRUE(ended.says("simulated")) << ended.error;
        if (durable_step_ >= 0 && !harmed_) {
            EXPECT_FALSE(ended.says("not consistent")) << ended.error;
            EXPECT_FALSE(ended.says("start afresh")) << ended.error;
        }
    }

    // A step that returned is at most one further than the durable one. A resumed run that did not
    // get there may have left only the older of two records.
    void note_durable(const Ended& ended, bool resumed) {
        if (ended.error.empty()) {
            durable_step_ = config_.steps;
        } else if (!ended.losses.empty()) {
            const int64_t from = ended.first - 1;
            durable_step_ = std::max(from, from + std::ssize(ended.losses) - 2);
        } else if (resumed && durable_step_ > 0) {
            --durable_step_;
        }
    }

    Lots lots_;
    Config config_;
    Odds hiccups_{};
    Ended whole_{};
    std::unique_ptr<SimulatedMachine> machine_;
    bool harmed_ = false;        // silently, in this life or before
    int64_t durable_step_ = -1;  // at least
    int64_t failures_before_ = 0;
};

class TrainRandom : public testing::Test {
protected:
    static void SetUpTestSuite() { setenv("FERRY_LOG", "error", 1); }
    const TinyData data_;
};

TEST_F(TrainRandom, EveryRunEndsExactOrNamed) {
    Seeds seeds(400);
    Counts counts;
    do {
        SCOPED_TRACE("FERRY_SIM_SEED=" + std::to_string(seeds.now()));
        RandomRun(seeds.now(), data_, false).ordinary(counts);
        if (HasFailure()) return;
    } while (seeds.next());
    if (seeds.replays() || seeds.count() < kSeedsForCounts) return;
    counts.print(seeds.count());
    counts.expect_all(seeds.count(),
                      {"exact", "named", "stopped", "slow for a while", "a bit turned",
                       "speculative updates committed", "speculative updates rolled back",
                       "skipped a step", "inputs spilled"});
    counts.expect_faults(seeds.count(), {aio::Fault::unsupported, aio::Fault::failed_flush});
}

TEST_F(TrainRandom, EveryDurableRunGoesOnOrSaysWhyNot) {
    Seeds seeds(200);
    Counts counts;
    do {
        SCOPED_TRACE("FERRY_SIM_SEED=" + std::to_string(seeds.now()));
        RandomRun(seeds.now(), data_, true).durable(counts);
        if (HasFailure()) return;
    } while (seeds.next());
    if (seeds.replays() || seeds.count() < kSeedsForCounts) return;
    counts.print(seeds.count());
    counts.expect_all(
        seeds.count(),
        {"went on", "went on after harm", "refused", "stopped", "slow for a while", "a bit turned",
         "speculative updates committed", "speculative updates rolled back", "inputs spilled"});
    counts.expect_faults(seeds.count(), {aio::Fault::unsupported});
}

TEST_F(TrainRandom, TheSameSeedIsTheSameRun) {
    for (uint64_t seed = 1; seed <= 5; ++seed) {
        Counts counts;
        RandomRun first(seed, data_, true), again(seed, data_, true);
        first.durable(counts);
        again.durable(counts);
        EXPECT_EQ(first.trace(), again.trace()) << "seed " << seed;
    }
}

}  // namespace
}  // namespace ferry::train
