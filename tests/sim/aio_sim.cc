// Seeded runs on a disk that goes wrong. A failing run prints its seed; the same seed is the same
// run.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <set>

#include "ferry/aio.h"
#include "tests/support/seeds.h"
#include "tests/support/simulated_disk.h"

namespace ferry::aio {
namespace {

constexpr int64_t kSlotBytes = 5 * 4096;
constexpr size_t kUnits = 6;        // pieces of state, each in one slot at a time
constexpr int64_t kSpareSlots = 2;  // fresh slots for new versions

struct AlignedBytes {
    static constexpr size_t kSize = kSlotBytes;
    std::byte* data = static_cast<std::byte*>(std::aligned_alloc(4096, kSize));
    AlignedBytes() { memset(data, 0, kSize); }
    ~AlignedBytes() { std::free(data); }
    AlignedBytes(const AlignedBytes&) = delete;
    AlignedBytes& operator=(const AlignedBytes&) = delete;
    std::span<std::byte> span() const { return {data, kSize}; }
};

void fill(std::span<std::byte> bytes, uint64_t unit, uint64_t version) {
    uint64_t state = (unit << 32 | version) * 0x9E3779B97F4A7C15u + 1;
    for (size_t i = 0; i < bytes.size(); i += 8) {
        state = state * 6364136223846793005u + 1442695040888963407u;
        memcpy(bytes.data() + i, &state, 8);
    }
}

VolumeOptions small_volume(int paths = 2) {
    VolumeOptions options{.classes = {{"state", kSlotBytes, kUnits + kSpareSlots}},
                          .block_bytes = 8192,
                          .queue_depth = 4,
                          .operations_max = 8,
                          .write_once = false};
    for (int i = 0; i < paths; ++i)
        options.paths.push_back({.path = std::string("p").append(std::to_string(i))});
    return options;
}

struct Outcome {
    std::string error;     // empty: exact to the last byte
    bool corrupt = false;  // verify() found wrong bytes
    uint64_t trace = 0;
};

// A toy of what swap does: every unit is written to a fresh slot as a new version, read back later,
// verified; several units are under way at once.
class Cycle {
public:
    Cycle(Volume& volume, Executor& executor) : volume_(volume), executor_(executor) {
        for (size_t i = 0; i < kUnits; ++i) units_[i].sums.resize(pieces_of(kSlotBytes));
    }

    // "" or the error that ended it. Everything has come back either way.
    std::string run(int steps) {
        for (int step = 1; step <= steps && error_.empty(); ++step) {
            write_all(static_cast<uint64_t>(step));
            if (error_.empty()) read_all();
            if (error_.empty()) flush_and_discard();
        }
        drain();
        return error_;
    }
    bool corrupt() const { return corrupt_; }

private:
    struct Unit {
        AlignedBytes bytes;
        SlotId slot = kNoSlot, fresh = kNoSlot;
        uint64_t version = 0;
        std::vector<uint64_t> sums;
        Operation operation;
    };

    void write_all(uint64_t version) {
        for (size_t i = 0; i < kUnits; ++i) {
            Unit& unit = units_[i];
            while (error_.empty() && (unit.fresh = volume_.allocate(0)) == kNoSlot) take_one();
            if (!error_.empty()) return;
            fill(unit.bytes.span(), i, version);
            seal(unit.bytes.span(), version, unit.sums);
            unit.version = version;
            unit.operation = {.kind = Kind::write,
                              .priority = Priority::background,
                              .slot = unit.fresh,
                              .buffer = unit.bytes.span(),
                              .tag = i};
            volume_.submit(unit.operation);
        }
        drain();
    }

    void read_all() {
        for (size_t i = 0; i < kUnits; ++i) {
            Unit& unit = units_[(i * 5 + 1) % kUnits];
            memset(unit.bytes.data, 0xee, kSlotBytes);
            unit.operation = {.kind = Kind::read,
                              .slot = unit.slot,
                              .buffer = unit.bytes.span(),
                              .tag = (i * 5 + 1) % kUnits};
            volume_.submit(unit.operation);
        }
        drain();
    }

    void flush_and_discard() {
        try {
            volume_.flush();
            volume_.discard_free_slots();
        } catch (const Error& error) {
            error_ = error.what();
        }
    }

    void drain() {
        while (volume_.in_flight() > 0) take_one();
    }

    void take_one() {
        Operation* operation = volume_.poll();
        if (!operation) return executor_.wait(kForever);
        Unit& unit = units_[operation->tag];
        FERRY_CHECK(operation == &unit.operation);
        if (operation->state == State::failed) {
            if (error_.empty()) error_ = to_error(volume_, *operation).what();
            return;
        }
        FERRY_CHECK(operation->state == State::done && operation->done_bytes == kSlotBytes);
        if (operation->kind == Kind::write) {
            if (unit.slot != kNoSlot) volume_.free(unit.slot);
            unit.slot = std::exchange(unit.fresh, kNoSlot);
            return;
        }
        check(unit, operation->tag);
    }

    void check(Unit& unit, size_t index) {
        const bool found = verify(unit.bytes.span(), unit.version, unit.sums) >= 0;
        AlignedBytes expected;
        fill(expected.span(), index, unit.version);
        const bool wrong = memcmp(unit.bytes.data, expected.data, kSlotBytes) != 0;
        FERRY_CHECK(found == wrong, "a wrong byte passed verification");
        if (!wrong) return;
        corrupt_ = true;
        if (error_.empty()) error_ = "wrong bytes in " + volume_.describe(unit.slot);
    }

    Volume& volume_;
    Executor& executor_;
    Unit units_[kUnits];
    std::string error_;
    bool corrupt_ = false;
};

Outcome run_cycle(const SimulatedDiskOptions& disk_options, int steps) {
    auto executor = make_simulated_executor(disk_options.seed);
    SimulatedDisk disk(disk_options, *executor);
    Outcome outcome;
    {
        auto volume = open_simulated_volume(small_volume(), *executor, disk);
        Cycle cycle(*volume, *executor);
        outcome.error = cycle.run(steps);
        outcome.corrupt = cycle.corrupt();
        FERRY_CHECK(volume->in_flight() == 0);
    }
    outcome.trace = disk.trace();
    return outcome;
}

TEST(AioSim, EverySeedIsExactOrNamed) {
    Seeds seeds(10'000);
    int64_t exact = 0, failed = 0, corrupt = 0;
    do {
        const Outcome outcome = run_cycle(troubled_disk(seeds.now(), true), 3);
        outcome.error.empty() ? ++exact : outcome.corrupt ? ++corrupt : ++failed;
        if (seeds.replays()) printf("%s\n", outcome.error.c_str());
    } while (seeds.next());
    if (seeds.replays()) return;
    printf("%ld seeds: %ld exact, %ld ended with a named error, %ld with wrong bytes found\n",
           static_cast<long>(seeds.count()), static_cast<long>(exact), static_cast<long>(failed),
           static_cast<long>(corrupt));
    // The mix has a good part of each, or the test tests nothing.
    EXPECT_GT(exact, seeds.count() / 4);
    EXPECT_GT(failed, seeds.count() / 20);
    EXPECT_GT(corrupt, seeds.count() / 20);
}

TEST(AioSim, TheSameSeedIsTheSameRun) {
    std::set<uint64_t> traces;
    for (uint64_t seed = 1; seed <= 100; ++seed) {
        const Outcome first = run_cycle(troubled_disk(seed, true), 3),
                      again = run_cycle(troubled_disk(seed, true), 3);
        EXPECT_EQ(first.trace, again.trace) << "seed " << seed;
        EXPECT_EQ(first.error, again.error) << "seed " << seed;
        traces.insert(first.trace);
    }
    EXPECT_EQ(traces.size(), 100u) << "different seeds are different runs";
}

// Harmless trouble leaves no trace at all.
TEST(AioSim, HarmlessTroubleIsGotOver) {
    for (uint64_t seed = 1; seed <= 300; ++seed) {
        const Outcome outcome = run_cycle({.seed = seed,
                                           .odds = {.shorten = 0.3,
                                                    .interrupt = 0.1,
                                                    .again = 0.1,
                                                    .stall = 0.05,
                                                    .partial_submission = 0.5}},
                                          3);
        EXPECT_EQ(outcome.error, "") << "seed " << seed;
    }
}

class EachFault : public testing::TestWithParam<Fault> {};

// Fails the n-th transfer, for n = 0, 1, 2, ... until the cycle has no n-th: each run ends exact or
// with a named error, and the same storage then serves a next run.
TEST_P(EachFault, AtEveryTransfer) {
    const Fault fault = GetParam();
    int64_t fired = 0, noticed = 0;
    for (int64_t nth = 0;; ++nth) {
        SCOPED_TRACE("transfer " + std::to_string(nth));
        auto executor = make_simulated_executor(3);
        SimulatedDisk disk({.seed = 3, .fault = fault, .fault_at = nth}, *executor);
        auto volume = open_simulated_volume(small_volume(), *executor, disk);
        std::string error;
        bool corrupt = false;
        {
            Cycle cycle(*volume, *executor);
            error = cycle.run(2);
            corrupt = cycle.corrupt();
        }
        volume.reset();
        if (disk.injected(fault) == 0) {
            EXPECT_EQ(error, "");
            break;
        }
        ++fired;
        noticed += !error.empty();
        if (silent(fault)) {
            // Wrong bytes that are never read again are no fault.
            EXPECT_EQ(corrupt, !error.empty()) << error;
        } else if (loud_failure(fault)) {
            EXPECT_NE(error.find("failed: "), std::string::npos) << error;
            EXPECT_FALSE(corrupt);
        } else {
            EXPECT_EQ(error, "");
        }
        if (fault == Fault::vanish) continue;  // that disk stays away
        volume = open_simulated_volume(small_volume(), *executor, disk);
        EXPECT_EQ(Cycle(*volume, *executor).run(2), "");
    }
    EXPECT_GT(fired, fault == Fault::unsupported ? 3 : 30);
    // Every write of this cycle is read back, so that no silent fault may pass unseen.
    if (silent(fault) || loud_failure(fault)) {
        EXPECT_EQ(noticed, fired);
    }
}

INSTANTIATE_TEST_SUITE_P(AioSim, EachFault,
                         testing::Values(Fault::shorten, Fault::interrupt, Fault::again,
                                         Fault::stall, Fault::unsupported, Fault::eio,
                                         Fault::enospc, Fault::erofs, Fault::vanish,
                                         Fault::bit_flip, Fault::lost_write,
                                         Fault::misdirected_write, Fault::torn_write),
                         [](const auto& fault) { return name_of(fault.param); });

// The other path goes on as if nothing had happened, and the one that is gone holds what it held.
TEST(AioSim, APathVanishesAlone) {
    auto executor = make_simulated_executor(3);
    SimulatedDisk disk({.seed = 3, .fault = Fault::vanish, .fault_at = 8}, *executor);
    auto volume = open_simulated_volume(small_volume(), *executor, disk);
    AlignedBytes bytes;
    const auto transfer = [&](Kind kind, SlotId slot) {
        if (kind == Kind::write) fill(bytes.span(), slot, 1);
        Operation operation{.kind = kind, .slot = slot, .buffer = bytes.span()};
        volume->submit(operation);
        while (!volume->poll()) executor->wait(kForever);
        return operation;
    };
    std::vector<SlotId> slots;
    std::set<int> gone;
    for (size_t i = 0; i < kUnits; ++i) {
        slots.push_back(volume->allocate(0));
        const Operation write = transfer(Kind::write, slots[i]);
        if (write.state == State::done) continue;
        EXPECT_EQ(write.error, ENODEV);
        gone.insert(volume->path_of(slots[i]));
    }
    ASSERT_EQ(gone.size(), 1u);
    for (const SlotId slot : slots) {
        const bool away = gone.contains(volume->path_of(slot));
        EXPECT_EQ(transfer(Kind::read, slot).state, away ? State::failed : State::done);
    }
    disk.heal();
    AlignedBytes expected;
    fill(expected.span(), slots[0], 1);
    EXPECT_EQ(transfer(Kind::read, slots[0]).state, State::done);
    EXPECT_EQ(memcmp(bytes.data, expected.data, kSlotBytes), 0);
}

// Writes versions 1, 2, ... to slots of their own, each followed by a flush of both paths; the
// power fails, or the process is killed, at every transfer: before, between and within the flushes.
class Stopped : public testing::TestWithParam<bool> {
protected:
    static constexpr size_t kVersions = 5;

    // Every promised version must be there. False: the run ended before.
    bool at_transfer(uint64_t seed, int64_t nth) {
        auto executor = make_simulated_executor(seed);
        SimulatedDisk disk(
            {.seed = seed, .odds = {.shorten = 0.1}, .power_loss = GetParam(), .stop_at = nth},
            *executor);
        promised_ = 0;
        {
            auto volume = open_simulated_volume(small_volume(), *executor, disk);
            write_versions(*volume, *executor);
        }
        if (disk.powered()) return false;
        disk.power_up();
        auto volume = open_simulated_volume(small_volume(), *executor, disk);
        for (size_t version = 1; version <= promised_; ++version)
            check(*volume, *executor, version);
        return true;
    }
    bool in_a_flush_ = false;

private:
    void write_versions(Volume& volume, Executor& executor) {
        AlignedBytes bytes;
        for (size_t version = 1; version <= kVersions; ++version) {
            fill(bytes.span(), version, version);
            Operation write{
                .kind = Kind::write, .slot = volume.allocate(0), .buffer = bytes.span()};
            volume.submit(write);
            while (!volume.poll()) executor.wait(kForever);
            if (write.state != State::done) return;
            if (!GetParam()) promised_ = version;  // a killed process loses nothing that was done
            try {
                volume.flush();
            } catch (const Error&) {
                in_a_flush_ = true;
                return;
            }
            promised_ = version;
        }
    }

    // Slots are handed out in the same order by each volume of the same shape.
    void check(Volume& volume, Executor& executor, size_t version) {
        AlignedBytes bytes, expected;
        fill(expected.span(), version, version);
        Operation read{.kind = Kind::read, .slot = volume.allocate(0), .buffer = bytes.span()};
        volume.submit(read);
        while (!volume.poll()) executor.wait(kForever);
        EXPECT_EQ(read.state, State::done);
        EXPECT_EQ(memcmp(bytes.data, expected.data, kSlotBytes), 0) << "version " << version;
    }

    size_t promised_ = 0;
};

TEST_P(Stopped, AtEveryTransferWhatWasPromisedIsThere) {
    for (uint64_t seed = 1; seed <= 50; ++seed) {
        SCOPED_TRACE("seed " + std::to_string(seed));
        int64_t nth = 0;
        in_a_flush_ = false;
        while (at_transfer(seed, nth)) ++nth;
        // Three transfers a version at least, and a flush for each path.
        EXPECT_GE(nth, static_cast<int64_t>(kVersions) * (3 + 2));
        EXPECT_TRUE(in_a_flush_);
    }
}

INSTANTIATE_TEST_SUITE_P(AioSim, Stopped, testing::Bool(), [](const auto& power) {
    return power.param ? "by_power_loss" : "by_a_kill";
});

// The first of a file's flushes fails, as after a lost write-back, and none later: nothing that
// was written before may be promised by a later one.
TEST(AioSim, AFlushThatFailedIsNotForgotten) {
    for (uint64_t seed = 1; seed <= 20; ++seed) {
        auto executor = make_simulated_executor(seed);
        constexpr int kTransfers = 3;  // of the write; then comes the first flush
        SimulatedDisk disk({.seed = seed, .fault = Fault::eio, .fault_at = kTransfers}, *executor);
        auto volume = open_simulated_volume(small_volume(2), *executor, disk);
        AlignedBytes bytes;
        fill(bytes.span(), 1, 1);
        Operation write{.kind = Kind::write, .slot = volume->allocate(0), .buffer = bytes.span()};
        const auto move = [&](Operation& operation) {
            volume->submit(operation);
            while (!volume->poll()) executor->wait(kForever);
            return operation.state;
        };
        const auto flush = [&] {
            try {
                volume->flush();
                return std::string();
            } catch (const Error& error) {
                return std::string(error.what());
            }
        };
        EXPECT_EQ(move(write), State::done);
        const std::string failed = flush();
        EXPECT_NE(failed.find("flush failed: Input/output error"), std::string::npos) << failed;
        EXPECT_EQ(disk.injected(Fault::eio), 1);
        EXPECT_EQ(flush(), failed) << "the same file, in the same words";
        EXPECT_EQ(move(write), State::done) << "the volume goes on all the same";
        EXPECT_EQ(flush(), failed);
        EXPECT_EQ(disk.injected(Fault::eio), 1) << "the disk was not asked again";
    }
}

// The same for a publication, whose flushes are the volume's own: no record may speak of those
// bytes.
TEST(AioSim, NothingIsPublishedAfterAFlushThatFailed) {
    auto executor = make_simulated_executor(1);
    SimulatedDisk disk({.seed = 1, .fault = Fault::eio, .fault_at = 0}, *executor);
    VolumeOptions options = small_volume(1);
    options.record_bytes = 64;
    auto volume = open_simulated_volume(options, *executor, disk);
    for (int attempt = 0; attempt < 3; ++attempt) {
        volume->publish(64);
        try {
            while (!volume->published()) {
                EXPECT_EQ(volume->poll(), nullptr);
                if (!volume->published()) executor->wait(kForever);
            }
            ADD_FAILURE() << "published, attempt " << attempt;
        } catch (const Error& error) {
            EXPECT_NE(std::string(error.what()).find("flush failed"), std::string::npos);
        }
    }
    EXPECT_EQ(disk.injected(Fault::eio), 1);
}

// The simulated disk itself: without a flush, bytes do get lost.
TEST(AioSim, UnflushedWritesGetLost) {
    auto executor = make_simulated_executor(1);
    SimulatedDisk disk({.seed = 1, .power_loss = true}, *executor);
    AlignedBytes bytes;
    fill(bytes.span(), 1, 1);
    {
        auto volume = open_simulated_volume(small_volume(1), *executor, disk);
        Operation write{.kind = Kind::write, .slot = volume->allocate(0), .buffer = bytes.span()};
        volume->submit(write);
        while (!volume->poll()) executor->wait(kForever);
        disk.lose_power();
        disk.power_up();
    }
    const auto& contents = disk.contents(0, 0);
    size_t kept = 0;
    for (size_t at = 0; at < kSlotBytes; at += 512)
        kept += memcmp(contents.data() + at, bytes.data + at, 512) == 0;
    EXPECT_GT(kept, 0u);
    EXPECT_LT(kept, static_cast<size_t>(kSlotBytes) / 512);
}

}  // namespace
}  // namespace ferry::aio
