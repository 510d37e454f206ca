// The store on the simulated executor and disk: objects on every tier, versions, failures.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>

#include "ferry/device.h"
#include "swap/store.h"
#include "tests/support/simulated_disk.h"

namespace ferry::swap {
namespace {

constexpr int64_t kBytes = 8192;

class StoreTest : public testing::Test, public Kernels {
protected:
    std::string describe(const Call&) const override { return "a kernel"; }
    bool runs_beside(const Task& task) const override { return task.flags == kBeside; }
    bool leaves_first(const Task& exchange) const override { return exchange.flags == kFirst; }
    // Kernels add their op to every byte of their first place, in the second.
    void run(const Call& call) noexcept override {
        ran_.push_back(call.task->item);
        for (int64_t i = 0; i < kBytes; ++i) {
            call.at[1][i] = static_cast<std::byte>(static_cast<int>(call.at[0][i]) + call.task->op);
        }
        if (call.task->object != kNoObject)
            call.store->seal(call.task->object, {call.at[1], kBytes});
    }

    void make(const std::vector<Object>& objects, aio::SimulatedDiskOptions faults = {}) {
        TearDown();  // what stands on the executor and the disk goes before they do
        executor_ = make_simulated_executor(faults.seed);
        disk_ = std::make_unique<aio::SimulatedDisk>(faults, *executor_);
        open(objects, aio::Leftover::remove);
    }
    // A store on the disk as it is.
    void open(const std::vector<Object>& objects, aio::Leftover leftover) {
        store_.reset();
        volume_.reset();
        device_ = Device::open(DeviceKind::cpu, *executor_);
        device_->reserve(8 * kBytes);
        aio::VolumeOptions volume{.paths = {{.path = "simulated"}},
                                  .classes = {{"state", kBytes, slots_}},
                                  .leftover = leftover,
                                  .write_once = false,
                                  .record_bytes = kRecordBytes};
        volume_ = aio::open_simulated_volume(volume, *executor_, *disk_);
        arena_.resize(16 * kBytes + 4096);
        const auto address = reinterpret_cast<uintptr_t>(arena_.data());
        host_ = {arena_.data() + (4096 - address % 4096) % 4096, 16 * kBytes};
        store_ =
            Store::make({.objects = objects,
                         .host_slots = {{.offset = 8 * kBytes, .slot_bytes = kBytes, .slots = 3}},
                         .resources = 8,
                         .host_arena = host_,
                         .collectives = collectives_},
                        *executor_, *device_, volume_.get(), *this);
    }
    void TearDown() override {
        store_.reset();
        volume_.reset();
        device_.reset();
    }

    std::span<std::byte> staging() const { return host_.first(kBytes); }
    void put(ObjectId object, uint8_t value) {
        std::fill_n(staging().data(), kBytes, std::byte{value});
        store_->put(object, staging());
    }
    int get(ObjectId object) {
        std::fill_n(staging().data(), kBytes, std::byte{255});
        store_->get(object, staging());
        EXPECT_TRUE(std::all_of(staging().begin(), staging().end(),
                                [&](std::byte b) { return b == staging()[0]; }));
        return static_cast<int>(staging()[0]);
    }

    static std::span<const std::byte> bytes_of(std::string_view text) {
        return std::as_bytes(std::span(text.data(), text.size()));
    }
    std::string restored(size_t n) {
        const auto state = store_->restore(n);
        if (!state) return "nothing";
        return {reinterpret_cast<const char*>(state->data()), state->size()};
    }

    // Tasks one after another: each waits for the one before. With a `state` what was current
    // before them is published beside them.
    void replay(std::vector<Task> tasks, std::string_view state = {}) {
        auto schedule = std::make_unique<Schedule>();
        for (Task& task : tasks) {
            auto& lane = schedule->lanes[static_cast<size_t>(task.lane)];
            task.index = static_cast<uint32_t>(lane.size());
            if (!schedule->tasks.empty()) {
                task.first_wait = static_cast<uint32_t>(schedule->waits.size());
                task.waits = 1;
                const Task& before = schedule->tasks.back();
                schedule->waits.push_back({before.lane, before.index});
            }
            lane.push_back(static_cast<uint32_t>(schedule->tasks.size()));
            schedule->tasks.push_back(task);
        }
        prove_acyclic(*schedule);
        schedules_.push_back(std::move(schedule));
        store_->append(*schedules_.back(), 1, 1);
        if (!state.empty()) store_->publish(bytes_of(state));
        store_->drain();
    }
    // Adds 1 to a stored object's bytes, as a committed version.
    std::vector<Task> update() {
        return {storage(Verb::read, 0), add(1, host(1), host(1), 0), storage(Verb::write, 0, true)};
    }

    static OperandPlace host(int64_t buffer) {
        return {OperandPlace::Kind::host, kNoObject, buffer * kBytes};
    }
    static Task storage(Verb verb, ObjectId object, bool commits = false) {
        Task task{.verb = verb,
                  .lane = verb == Verb::read ? Lane::read : Lane::write,
                  .commits = commits,
                  .object = object,
                  .bytes = kBytes};
        task.places[0] = host(1);
        return task;
    }
    static Task add(int op, OperandPlace from, OperandPlace to, ObjectId seals = kNoObject) {
        Task task{.lane = Lane::team, .op = static_cast<uint8_t>(op), .object = seals};
        task.places[0] = from;
        task.places[1] = to;
        return task;
    }

    static constexpr uint8_t kBeside = 1, kFirst = 2;
    std::vector<int32_t> ran_;  // items of kernels, in the order in which they ran
    static constexpr int64_t kRecordBytes = 512;
    Collectives* collectives_ = nullptr;
    int64_t slots_ = 3;
    std::unique_ptr<Executor> executor_;
    std::unique_ptr<aio::SimulatedDisk> disk_;
    std::unique_ptr<Device> device_;
    std::unique_ptr<aio::Volume> volume_;
    std::vector<std::byte> arena_;
    std::span<std::byte> host_;
    std::unique_ptr<Store> store_;
    std::vector<std::unique_ptr<Schedule>> schedules_;
};

const Object kOnDevice{.home = Tier::device, .bytes = kBytes, .offset = kBytes};
const Object kOnHost{.home = Tier::host, .bytes = kBytes, .offset = 4 * kBytes};
const Object kVersionedOnHost{
    .home = Tier::host, .bytes = kBytes, .slot_class = 0, .versioned = true};
const Object kStored{.home = Tier::nvme, .bytes = kBytes, .slot_class = 0};
const Object kVersionedStored{
    .home = Tier::nvme, .bytes = kBytes, .slot_class = 0, .versioned = true};

// Notes when an exchange begins, and ends it at once.
class Noting final : public Collectives {
public:
    explicit Noting(std::vector<int32_t>& ran) : ran_(ran) {}
    void start(const Call& call) override { ran_.push_back(call.task->item); }
    void signal(std::atomic<uint64_t>& counter) override { ++counter; }
    void check() override {}

private:
    std::vector<int32_t>& ran_;
};

// A kernel that nothing else keeps back.
TEST_F(StoreTest, AnExchangeThatLeavesFirstIsNotOvertakenByKernels) {
    Noting noting(ran_);
    collectives_ = &noting;
    make({});
    for (const uint8_t flags : {uint8_t{0}, kFirst}) {
        Schedule schedule;
        const auto append = [&](Lane lane, int32_t item, uint8_t of, std::vector<Wait> waits) {
            Task task = add(1, host(0), host(0));
            task.lane = lane;
            task.item = item;
            task.flags = of;
            auto& tasks = schedule.lanes[static_cast<size_t>(lane)];
            task.index = static_cast<uint32_t>(tasks.size());
            task.first_wait = static_cast<uint32_t>(schedule.waits.size());
            task.waits = static_cast<uint32_t>(waits.size());
            schedule.waits.insert(schedule.waits.end(), waits.begin(), waits.end());
            tasks.push_back(static_cast<uint32_t>(schedule.tasks.size()));
            schedule.tasks.push_back(task);
        };
        append(Lane::compute, 0, 0, {});
        append(Lane::comm, 1, flags, {{Lane::compute, 0}});
        for (int32_t item = 2; item < 5; ++item) append(Lane::compute, item, 0, {});
        prove_acyclic(schedule);
        ran_.clear();
        store_->append(schedule, 1, 1);
        store_->drain();
        std::vector<int32_t> expected{0, 1, 2, 3, 4};
        if (flags == kFirst) {
            EXPECT_EQ(ran_, expected);
        } else {
            EXPECT_EQ(ran_.size(), expected.size());
        }
    }
    store_.reset();
}

TEST_F(StoreTest, ObjectsOnEveryTierKeepTheirBytes) {
    make({kOnDevice, kOnHost, kVersionedOnHost, kStored, kVersionedStored});
    for (ObjectId id = 0; id < 5; ++id) put(id, static_cast<uint8_t>(10 + id));
    for (ObjectId id = 0; id < 5; ++id) EXPECT_EQ(get(id), 10 + static_cast<int>(id));
}

TEST_F(StoreTest, ACommittedWriteBecomesCurrent) {
    make({kVersionedStored});
    put(0, 7);
    for (int round = 1; round <= 5; ++round) {  // more rounds than slots: the old one is freed
        replay(
            {storage(Verb::read, 0), add(1, host(1), host(1), 0), storage(Verb::write, 0, true)});
        EXPECT_EQ(get(0), 7 + round);
    }
}

TEST_F(StoreTest, ASpeculativeUpdateOnNvmeStandsOrFallsWithTheOutcome) {
    make({kVersionedStored});
    put(0, 7);
    const auto speculative = [&] {
        replay({storage(Verb::read, 0), add(1, host(1), host(1), 0), storage(Verb::write, 0)});
    };
    speculative();
    EXPECT_EQ(get(0), 7);  // the old version stays until the outcome
    replay({storage(Verb::rollback, 0)});
    EXPECT_EQ(get(0), 7);
    speculative();
    replay({storage(Verb::commit, 0)});
    EXPECT_EQ(get(0), 8);
}

TEST_F(StoreTest, ASpeculativeUpdateInHostMemoryStandsOrFallsWithTheOutcome) {
    make({kVersionedOnHost});
    put(0, 7);
    const Task speculative =
        add(1, {OperandPlace::Kind::current, 0, 0}, {OperandPlace::Kind::fresh, 0, 0});
    replay({speculative});
    EXPECT_EQ(get(0), 7);
    replay({storage(Verb::rollback, 0), speculative, storage(Verb::commit, 0)});
    EXPECT_EQ(get(0), 8);
}

TEST_F(StoreTest, WrongBytesStopTheRunWithPlaceAndPiece) {
    make({kStored}, {.seed = 3, .fault = aio::Fault::bit_flip, .fault_at = 0});
    put(0, 7);
    try {
        get(0);
        FAIL();
    } catch (const Error& error) {
        EXPECT_EQ(error.trouble(), Trouble::io);
        EXPECT_NE(std::string(error.what()).find("not those written"), std::string::npos);
        EXPECT_NE(std::string(error.what()).find("simulated"), std::string::npos);
    }
}

TEST_F(StoreTest, AFailedReadInAScheduleIsThrownAndNothingHangs) {
    make({kVersionedStored}, {.seed = 4, .fault = aio::Fault::eio, .fault_at = 1});
    put(0, 7);
    EXPECT_THROW(replay({storage(Verb::read, 0), add(1, host(1), host(1), 0),
                         storage(Verb::write, 0, true)}),
                 Error);
}

// A committed update, a speculative update rolled back and one committed, with one fault at the
// n-th transfer, for every n: they end exact or with a named error, and nothing hangs or stays
// behind.
TEST_F(StoreTest, EveryFaultAtEveryTransferOfACycle) {
    for (int kind = 1; kind < aio::kFaults; ++kind) {
        const auto fault = static_cast<aio::Fault>(kind);
        // These two are faults of discards and flushes: a cycle has neither.
        if (fault == aio::Fault::unsupported || fault == aio::Fault::failed_flush) continue;
        int64_t fired = 0, caught = 0;
        for (int64_t nth = 0;; ++nth) {
            SCOPED_TRACE(std::string(name_of(fault)) + " at " + std::to_string(nth));
            TearDown();
            make({kVersionedStored}, {.seed = 5, .fault = fault, .fault_at = nth});
            std::string error;
            try {
                put(0, 7);
                Task verified = storage(Verb::verify, 0);
                verified.lane = Lane::check;
                const auto update = [&](int by, bool commits) {
                    replay({storage(Verb::read, 0), verified, add(by, host(1), host(1), 0),
                            storage(Verb::write, 0, commits)});
                };
                update(1, true);
                update(20, false);
                replay({storage(Verb::rollback, 0)});
                update(2, false);
                replay({storage(Verb::commit, 0)});
                EXPECT_EQ(get(0), 10);
            } catch (const Error& thrown) {
                EXPECT_EQ(thrown.trouble(), Trouble::io);
                error = thrown.what();
            }
            if (disk_->injected(fault) == 0) break;
            ++fired;
            const bool named = error.find("simulated") != std::string::npos;
            EXPECT_TRUE(named || error.empty()) << error;
            if (!silent(fault)) {
                EXPECT_EQ(named, loud_failure(fault)) << error;
            }
            caught += named ? 1 : 0;
        }
        EXPECT_GE(fired, 4) << name_of(fault);
        EXPECT_TRUE(caught > 0 || !(silent(fault) || loud_failure(fault))) << name_of(fault);
    }
}

// As often as there are slots and more: what the last durable map names is not written over.
TEST_F(StoreTest, WhatIsDurableStaysUntilTheNextIs) {
    make({kVersionedStored});
    put(0, 7);
    replay({}, "seven");
    for (int round = 0; round < 4; ++round) replay(update());
    EXPECT_EQ(get(0), 11);
    open({kVersionedStored}, aio::Leftover::resume);
    EXPECT_EQ(restored(0), "seven");
    EXPECT_EQ(get(0), 7);
    replay(update());
    replay(update(), "eight");
    EXPECT_EQ(get(0), 9);
    open({kVersionedStored}, aio::Leftover::resume);
    EXPECT_EQ(restored(0), "eight");
    EXPECT_EQ(get(0), 8);
    // The one before: its slot is free since then, and was written by nobody.
    EXPECT_EQ(restored(1), "seven");
    EXPECT_EQ(restored(2), "nothing");
}

// Two slots: each update waits until the version before the one it replaces is no longer needed.
TEST_F(StoreTest, TwiceTheSlotsAreEnough) {
    slots_ = 2;
    make({kVersionedStored});
    put(0, 7);
    replay({}, "first");
    replay(update());
    for (int round = 0; round < 5; ++round) {
        replay(update(), "next");
        EXPECT_EQ(get(0), 9 + round);
    }
    open({kVersionedStored}, aio::Leftover::resume);
    EXPECT_EQ(restored(0), "next");
    EXPECT_EQ(get(0), 12);
}

// A speculative update is no version yet; whatever its outcome, what was published before stands.
TEST_F(StoreTest, ASpeculativeUpdateIsNotPublished) {
    make({kVersionedStored});
    put(0, 7);
    const std::vector<Task> speculative{storage(Verb::read, 0), add(20, host(1), host(1), 0),
                                        storage(Verb::write, 0)};
    replay(speculative);
    replay({}, "while it is undecided");
    open({kVersionedStored}, aio::Leftover::resume);
    restored(0);
    EXPECT_EQ(get(0), 7);
}

TEST_F(StoreTest, AMapOfOtherObjectsIsNotTakenOver) {
    make({kVersionedStored});
    put(0, 7);
    replay({}, "of one object");
    open({kVersionedStored, kVersionedStored}, aio::Leftover::resume);
    EXPECT_THROW(restored(0), Error);
    Object smaller = kVersionedStored;
    smaller.bytes = kBytes / 2;
    open({smaller}, aio::Leftover::resume);
    EXPECT_THROW(restored(0), Error);
    open({kVersionedStored}, aio::Leftover::resume);
    EXPECT_EQ(restored(0), "of one object");
}

// The map is as it was written; the slot is not.
TEST_F(StoreTest, ADurableVersionThatIsNotWhatWasWrittenIsFound) {
    make({kVersionedStored});
    put(0, 7);
    replay({}, "seven");
    open({kVersionedStored}, aio::Leftover::resume);
    auto& contents = disk_->contents(0, 0);
    for (size_t at = 0; at < 3 * kBytes; at += kBytes) contents[at + 17] ^= std::byte{1};
    EXPECT_EQ(restored(0), "seven");
    EXPECT_THROW(get(0), Error);
}

// Tasks of the team that nothing orders but their lane. Where a task may not run beside its
// neighbours, or writes where one of them does, it runs behind all before it and ahead of all
// behind it.
TEST_F(StoreTest, WhatRunsBesideNeighboursPassesNothingElse) {
    constexpr int32_t kTasks = 12, kAlone = 5, kSamePlace = 9;
    bool overtaken = false;
    for (uint32_t seed = 1; seed <= 50; ++seed) {
        make({kOnHost}, {.seed = seed});
        Schedule schedule;
        for (int32_t item = 0; item < kTasks; ++item) {
            const int64_t place = item == kSamePlace ? kSamePlace - 1 : item;
            Task task = add(1, host(place % 8), host(place % 8));
            task.flags = item == kAlone ? 0 : kBeside;
            task.item = item;
            task.index = static_cast<uint32_t>(item);
            schedule.lanes[static_cast<size_t>(Lane::team)].push_back(task.index);
            schedule.tasks.push_back(task);
        }
        ran_.clear();
        store_->append(schedule, 1, 1);
        store_->drain();
        const auto at = [&](int32_t item) { return std::ranges::find(ran_, item) - ran_.begin(); };
        ASSERT_EQ(std::ssize(ran_), kTasks);
        for (int32_t item = 0; item < kTasks; ++item) {
            for (const int32_t fixed : {kAlone, kSamePlace})
                EXPECT_EQ(at(item) < at(fixed), item < fixed) << item << ", seed " << seed;
        }
        overtaken = overtaken || !std::ranges::is_sorted(ran_);
    }
    EXPECT_TRUE(overtaken);  // else nothing was shown
}

TEST_F(StoreTest, ReportsBytesByLane) {
    make({kVersionedStored});
    put(0, 7);
    store_->reset_report();
    replay({storage(Verb::read, 0), add(1, host(1), host(1), 0), storage(Verb::write, 0, true)});
    const auto report = store_->report();
    EXPECT_EQ(report[static_cast<size_t>(Lane::read)].bytes, kBytes);
    EXPECT_EQ(report[static_cast<size_t>(Lane::write)].bytes, kBytes);
    EXPECT_EQ(report[static_cast<size_t>(Lane::team)].tasks, 1);
}

}  // namespace
}  // namespace ferry::swap
