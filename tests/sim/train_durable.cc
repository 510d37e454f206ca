// Runs with durable steps that end by a kill or a power failure at any transfer, and go on: they
// end with the bits of the run that was never interrupted, or say why they cannot.
//   FERRY_SIM_STRIDE=1 stops at every transfer, FERRY_SIM_SEED=77 is another disk.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <map>

#include "tests/support/seeds.h"
#include "tests/support/simulated_machine.h"
#include "tests/support/tiny_run.h"
#include "tests/support/write_tokens.h"

namespace ferry::train {
namespace {

Config durable(Config config, size_t paths = 1) {
    config.checkpoint.durable_steps = true;
    config.budgets.nvme.clear();
    for (size_t p = 0; p < paths; ++p)
        config.budgets.nvme.push_back(
            {.path = "simulated" + std::to_string(p), .size_bytes = 64 * kMiB});
    return config;
}

// Every format and fate of a step: overflows are skipped, clipped steps roll their speculative
// updates back.
Config of_kind(Config config, const std::string& kind) {
    if (kind == "bf16" || kind == "split") config.precision = DType::bf16;
    if (kind == "split") config.optimizer.master = MasterFormat::split;
    if (kind == "split") config.optimizer.moments = MomentType::bf16;
    if (kind == "frozen") config.precision = DType::bf16;
    if (kind == "frozen") config.optimizer.master = MasterFormat::split;
    if (kind == "frozen") config.freeze = {"model.layers.0.*"};
    if (kind == "int8") config = with_coded_moments(config);
    if (kind == "fp16") {
        config.precision = DType::f16;
        config.batch = {.sequence = 1, .micro_batch = 1, .micro_batches = 2};
        config.model.norm_eps = 1e-30;
        config.clip_norm = 1e6;
    }
    return config;
}

// A machine, and where records lie on its disk.
class Machine : public SimulatedMachine {
public:
    using SimulatedMachine::SimulatedMachine;

    // Where the copies of the record are, oldest first.
    std::vector<size_t> copies() {
        const auto& bytes = disk().contents(0, 0);
        std::map<uint64_t, size_t> by_sequence;
        for (size_t at = 0; at + 64 <= bytes.size(); at += 4096) {
            if (memcmp(bytes.data() + at, "ferryrec", 8) != 0) continue;
            uint64_t sequence = 0;
            memcpy(&sequence, bytes.data() + at + 16, sizeof sequence);
            by_sequence[sequence] = at;
        }
        std::vector<size_t> found;
        for (const auto& [sequence, at] : by_sequence) found.push_back(at);
        return found;
    }
};

struct Case {
    const char* kind;
    const char* speculative;
    size_t paths;
    bool power;
    int64_t stride;
};

class Durable : public testing::TestWithParam<Case> {
protected:
    static void SetUpTestSuite() {
        setenv("FERRY_LOG", "error", 1);
        data_ = new TinyData;
    }
    static void TearDownTestSuite() { delete data_; }

    static Config config() {
        Config made = of_kind(tiny_config_on_nvme(*data_), GetParam().kind);
        set_value(made, std::string("swap.speculate=") + GetParam().speculative);
        return durable(made, GetParam().paths);
    }
    static Ended in_memory() {
        return run_in_memory(of_kind(tiny_config(*data_), GetParam().kind));
    }
    static void expect_the_rest(const Ended& resumed, const Ended& whole) {
        ASSERT_EQ(resumed.error, "");
        const auto from = static_cast<std::ptrdiff_t>(resumed.first - 1);
        EXPECT_EQ(resumed.losses, std::vector(whole.losses.begin() + from, whole.losses.end()));
        EXPECT_EQ(resumed.norms, std::vector(whole.norms.begin() + from, whole.norms.end()));
        EXPECT_EQ(resumed.hash, whole.hash);
    }

    static TinyData* data_;
};
TinyData* Durable::data_ = nullptr;

TEST_P(Durable, StoppedAtAnyTransferGoesOnWithTheSameBits) {
    const Ended whole = in_memory();
    const Config made = config();
    const auto seed = from_environment("FERRY_SIM_SEED", 1);
    const int64_t stride = stride_of(GetParam().stride);
    std::map<int64_t, int> resumed_at;
    int64_t refused = 0, stop = 0;
    for (;; stop += stride) {
        SCOPED_TRACE("stopped at transfer " + std::to_string(stop));
        Machine machine({.seed = seed + static_cast<uint64_t>(stop),
                         .power_loss = GetParam().power,
                         .stop_at = stop});
        const Ended before = machine.run(made, false);
        if (machine.disk().powered()) {
            expect_the_rest(before, whole);
            break;
        }
        EXPECT_EQ(before.trouble, Trouble::io) << before.error;
        machine.disk().power_up();
        const Ended after = machine.run(made, true);
        if (!after.error.empty()) {  // only before the first record was there
            EXPECT_EQ(before.losses.size(), 0u);
            EXPECT_NE(after.error.find("not consistent"), std::string::npos) << after.error;
            ++refused;
        } else {
            expect_the_rest(after, whole);
            // A step that returned is at most one further than the durable one.
            EXPECT_GE(after.first - 1, std::ssize(before.losses) - 2);
            ++resumed_at[after.first - 1];
        }
        if (HasFailure()) return;
    }
    EXPECT_GT(refused, 0);
    for (int64_t step = 0; step < made.steps; ++step)
        EXPECT_GT(resumed_at[step], 0) << "never resumed after step " << step;
}

TEST_P(Durable, AfterItsEndARunGoesOn) {
    const Ended whole = in_memory();
    const Config made = config();
    Machine machine({.seed = 3});
    Config shorter = made;
    shorter.steps = 4;
    const Ended first = machine.run(shorter, false);
    EXPECT_EQ(first.error, "");
    const Ended again = machine.run(shorter, true);  // nothing to do
    EXPECT_EQ(again.first, 5);
    EXPECT_EQ(again.hash, first.hash);
    const Ended rest = machine.run(made, true);
    EXPECT_EQ(rest.first, 5);
    expect_the_rest(rest, whole);
}

INSTANTIATE_TEST_SUITE_P(
    Runs, Durable,
    testing::Values(Case{"fp32", "all", 1, true, 1}, Case{"fp32", "all", 1, false, 7},
                    Case{"fp32", "off", 3, true, 5}, Case{"fp32", "all", 3, true, 7},
                    Case{"bf16", "auto", 2, true, 11}, Case{"fp16", "all", 1, true, 11},
                    Case{"split", "all", 2, true, 11}, Case{"split", "off", 1, false, 17},
                    Case{"frozen", "all", 1, true, 17}, Case{"int8", "all", 2, true, 29}),
    [](const auto& one) {
        const Case& c = one.param;
        return std::string(c.kind) + "_speculate_" + c.speculative + "_" + std::to_string(c.paths) +
               "_" + (c.power ? "power" : "kill");
    });

class DurableFp32 : public Durable {};
INSTANTIATE_TEST_SUITE_P(Runs, DurableFp32, testing::Values(Case{"fp32", "all", 2, false, 1}),
                         [](const auto&) { return "speculate_all"; });

TEST_P(DurableFp32, WithSpeculationCommittedAndRolledBack) {
    Machine machine({.seed = 1});
    const Ended ended = machine.run(config(), false);
    expect_the_rest(ended, in_memory());
    EXPECT_GT(ended.report.steps_committed, 0);
    EXPECT_GT(ended.report.steps_rolled_back, 0);
}

// The newest record is damaged: the one before stands exactly as long as nothing was written over
// its slots.
TEST_P(DurableFp32, TheOlderRecordStandsWhileItsSlotsAreIntact) {
    const Ended whole = in_memory();
    const Config made = config();
    int64_t older = 0, refused = 0;
    for (int64_t stop = 60;; stop += is_quick() ? 31 : 7) {
        SCOPED_TRACE("stopped at transfer " + std::to_string(stop));
        Machine machine({.seed = static_cast<uint64_t>(stop), .stop_at = stop});
        machine.run(made, false);
        if (machine.disk().powered()) break;
        machine.disk().power_up();
        if (machine.copies().size() < 2) continue;
        machine.disk().contents(0, 0)[machine.copies().back() + 100] ^= std::byte{1};
        const Ended after = machine.run(made, true);
        if (after.error.empty()) {
            expect_the_rest(after, whole);
            ++older;
        } else {
            EXPECT_EQ(after.trouble, Trouble::io);
            EXPECT_NE(after.error.find("not consistent"), std::string::npos) << after.error;
            EXPECT_NE(after.error.find("simulated"), std::string::npos) << after.error;
            ++refused;
        }
        if (HasFailure()) return;
    }
    EXPECT_GT(older, 0);
    EXPECT_GT(refused, 0);
}

// Any wrong byte of what is stored is found where it is read back, or it is none of the state's.
TEST_P(DurableFp32, AWrongByteAnywhereIsFoundOrMeansNothing) {
    const Ended whole = in_memory();
    const Config made = config();
    int64_t exact = 0, refused = 0;
    for (int64_t round = 0;; round += is_quick() ? 5 : 1) {
        const int path = static_cast<int>(round % 2);
        const size_t at = 1000 + static_cast<size_t>(round) * 3 * 4096;
        const int64_t stop = 500 + 31 * (round % 11);
        SCOPED_TRACE("byte " + std::to_string(at) + " of path " + std::to_string(path) +
                     ", stopped at transfer " + std::to_string(stop));
        Machine machine({.seed = 5, .stop_at = stop});
        machine.run(made, false);
        machine.disk().power_up();
        auto& bytes = machine.disk().contents(path, 0);
        if (at >= bytes.size()) break;
        bytes[at] ^= std::byte{4};
        const Ended after = machine.run(made, true);
        if (after.error.empty()) {
            expect_the_rest(after, whole);
            ++exact;
        } else {
            EXPECT_EQ(after.trouble, Trouble::io) << after.error;
            ++refused;
        }
        if (HasFailure()) return;
    }
    EXPECT_GT(exact, 0);
    EXPECT_GT(refused, 0);
}

// A run that meets a wrong byte says whether it belongs to the state that --resume goes on from.
TEST_P(DurableFp32, WhatIsCalledGoodCanBeResumed) {
    const Ended whole = in_memory();
    const Config made = config();
    const int64_t stride = stride_of(17);
    int64_t good = 0, doubtful = 0, lost = 0;
    for (const aio::Fault fault : {aio::Fault::bit_flip, aio::Fault::lost_write}) {
        for (int64_t n = 0;; n += stride) {
            SCOPED_TRACE(std::string(aio::name_of(fault)) + " at " + std::to_string(n));
            Machine machine({.seed = static_cast<uint64_t>(n) + 1, .fault = fault, .fault_at = n});
            const Ended first = machine.run(made, false);
            if (machine.disk().injected(fault) == 0) break;
            if (first.error.empty() || first.losses.empty()) continue;
            const Ended after = machine.run(made, true);
            if (first.says("the last durable step has none of these bytes")) {
                expect_the_rest(after, whole);
                ++good;
            } else {
                EXPECT_TRUE(first.says("the last durable step has these bytes too")) << first.error;
                ++doubtful;
                lost += after.error.empty() ? 0 : 1;
            }
            if (HasFailure()) return;
        }
    }
    EXPECT_GT(good, 0);
    EXPECT_GT(doubtful, 0);
    EXPECT_GT(lost, 0) << "what cannot be resumed was called good before";
}

// A transfer that fails says nothing against what is there: nobody is told to give it up, and it is
// gone on with once transfers work again.
TEST_P(DurableFp32, WhatCannotBeRestoredIsNotCalledWrong) {
    const Ended whole = in_memory();
    const Config made = config();
    std::map<std::string, int> refused;
    const aio::SimulatedDiskOptions::Odds troubles[] = {
        {.eio = 1}, {.eio = 0.15}, {.enospc = 1}, {.enospc = 0.15}};
    for (int seed = 1; seed <= (is_quick() ? 16 : 60); ++seed) {
        SCOPED_TRACE("disk " + std::to_string(seed));
        Machine machine({.seed = static_cast<uint64_t>(seed), .stop_at = 200 + 7 * seed});
        machine.run(made, false);
        machine.disk().heal();
        machine.disk().trouble(troubles[seed % 4], -1);
        const Ended failed = machine.run(made, true);
        EXPECT_TRUE(failed.error.empty() || failed.trouble == Trouble::io) << failed.error;
        EXPECT_FALSE(failed.says("not consistent")) << failed.error;
        EXPECT_FALSE(failed.says("start afresh")) << failed.error;
        for (const char* what : {"reading a record", "read failed", "write failed"})
            refused[what] +=
                failed.says(std::string("its state cannot be restored: ") + what) ? 1 : 0;
        machine.disk().heal();
        expect_the_rest(machine.run(made, true), whole);
        if (HasFailure()) return;
    }
    for (const auto& [what, count] : refused) EXPECT_GT(count, 0) << what;
}

TEST_P(DurableFp32, AnotherRunIsRefusedWithWhatDiffers) {
    const Config made = config();
    Machine machine({.seed = 5});
    machine.run(made, false);
    const auto refused = [&](auto change, const std::string& words) {
        Config other = made;
        change(other);
        const Ended ended = machine.run(other, true);
        EXPECT_EQ(ended.trouble, Trouble::usage) << ended.error;
        EXPECT_NE(ended.error.find(words), std::string::npos) << ended.error;
    };
    refused([](Config& c) { c.optimizer.lr = 1e-3; }, "optimizer.lr = 0.001");
    refused([](Config& c) { c.seed = 4; }, "seed = 4");
    refused([](Config& c) { c.clip_norm = 0; }, "clip_norm = 0");
    refused([](Config& c) { c.schedule.warmup_steps = 3; }, "schedule.warmup_steps = 3");
    refused([](Config& c) { c.data.held_back = 0.5; }, "data.held_back = 0.5");
    // On files the header would say that this is another run.
    refused([](Config& c) { c.batch.micro_batches = 4; }, "not consistent");
    const std::string other_tokens = std::string(made.data.tokens) + ".other";
    write_tokens(other_tokens, std::vector<uint32_t>(1500, 7), 32, {});
    refused([&](Config& c) { c.data.tokens = other_tokens; }, "data.tokens");
    EXPECT_EQ(machine.run(made, true).error, "") << "refusing changed something";
}

// One fault at the n-th transfer: the run ends exact or named, and what it left can be resumed.
TEST_P(DurableFp32, AfterEveryFaultItGoesOn) {
    const Ended whole = in_memory();
    const Config made = config();
    const int64_t stride = stride_of(41);
    for (const aio::Fault fault : {aio::Fault::eio, aio::Fault::enospc, aio::Fault::shorten,
                                   aio::Fault::torn_write, aio::Fault::lost_write}) {
        int64_t failed = 0;
        for (int64_t n = 0;; n += stride) {
            SCOPED_TRACE(std::string(aio::name_of(fault)) + " at " + std::to_string(n));
            Machine machine({.seed = static_cast<uint64_t>(n) + 1, .fault = fault, .fault_at = n});
            const Ended first = machine.run(made, false);
            if (machine.disk().injected(fault) == 0) break;
            if (first.error.empty()) {
                expect_the_rest(first, whole);
            } else {
                EXPECT_EQ(first.trouble, Trouble::io) << first.error;
                ++failed;
            }
            const Ended after = machine.run(made, true);
            if (after.error.empty()) expect_the_rest(after, whole);
            // A write that only seemed to happen may have been the state's, or both records'.
            if (!aio::silent(fault) && !first.losses.empty()) {
                EXPECT_EQ(after.error, "");
            }
            if (HasFailure()) return;
        }
        EXPECT_EQ(failed > 0, fault != aio::Fault::shorten) << aio::name_of(fault);
    }
}

}  // namespace
}  // namespace ferry::train
