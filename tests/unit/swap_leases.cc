// Leases on the simulated disk: what is cached, what waits for what, what is refused.
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <string>
#include <vector>

#include "aio/buffer.h"
#include "ferry/lease.h"
#include "tests/support/simulated_disk.h"

namespace ferry::swap {
namespace {

constexpr int64_t kBytes = 8192;

// Transfers that end between two looks: every second one sees nothing.
class LateVolume final : public aio::Volume {
public:
    explicit LateVolume(aio::Volume& volume) : volume_(volume) {}
    aio::Operation* poll() noexcept override { return looks_++ % 2 ? volume_.poll() : nullptr; }
    aio::SlotId allocate(int c) noexcept override { return volume_.allocate(c); }
    void free(aio::SlotId slot) noexcept override { volume_.free(slot); }
    void discard_free_slots() override { volume_.discard_free_slots(); }
    void finish_layout() override { volume_.finish_layout(); }
    bool try_submit(aio::Operation& o) noexcept override { return volume_.try_submit(o); }
    void cancel_queued() noexcept override { volume_.cancel_queued(); }
    int in_flight() const noexcept override { return volume_.in_flight(); }
    void flush() override { volume_.flush(); }
    void note_step(int64_t step) noexcept override { volume_.note_step(step); }
    int64_t noted_step() const noexcept override { return volume_.noted_step(); }
    void note_lost() noexcept override { volume_.note_lost(); }
    std::span<std::byte> record() noexcept override { return volume_.record(); }
    void publish(int64_t bytes) noexcept override { volume_.publish(bytes); }
    bool published() override { return volume_.published(); }
    std::string missing() const override { return volume_.missing(); }
    std::span<const std::byte> found_record(size_t n) const override {
        return volume_.found_record(n);
    }
    void resume_from(size_t n) noexcept override { volume_.resume_from(n); }
    bool take(int c, std::span<const aio::SlotId> slots) override { return volume_.take(c, slots); }
    int64_t alignment() const noexcept override { return volume_.alignment(); }
    int64_t slot_bytes(int c) const noexcept override { return volume_.slot_bytes(c); }
    int path_of(aio::SlotId slot) const noexcept override { return volume_.path_of(slot); }
    std::string describe(aio::SlotId slot) const override { return volume_.describe(slot); }
    std::string_view backend_name() const noexcept override { return volume_.backend_name(); }
    bool direct(int path) const noexcept override { return volume_.direct(path); }
    std::vector<aio::PathCounters> counters() const override { return volume_.counters(); }
    int64_t reserved_bytes() const noexcept override { return volume_.reserved_bytes(); }
    int64_t peak_bytes() const noexcept override { return volume_.peak_bytes(); }

private:
    aio::Volume& volume_;
    int looks_ = 0;
};

class LeasesTest : public testing::Test {
protected:
    struct Setup {
        std::vector<LeasedObject> objects = objects_of(4);
        int64_t buffers = 2, spare = 1, slots = 8;
        int operations_max = 256;
        bool verify = true;
        Parallel parallel{};
        aio::SimulatedDiskOptions disk{.seed = 1};
    };
    static std::vector<LeasedObject> objects_of(int count, int64_t bytes = kBytes) {
        return {static_cast<size_t>(count),
                LeasedObject{.home = Home::nvme, .bytes = bytes, .slot_class = 0}};
    }

    void make(Setup setup) {
        store_.reset();
        volume_.reset();
        executor_ = make_simulated_executor(setup.disk.seed);
        disk_ = std::make_unique<aio::SimulatedDisk>(setup.disk, *executor_);
        volume_ = aio::open_simulated_volume({.paths = {{.path = "simulated"}},
                                              .classes = {{"state", kBytes, setup.slots}},
                                              .operations_max = setup.operations_max,
                                              .write_once = false},
                                             *executor_, *disk_);
        slots_ = setup.slots;
        store_ = LeasedStore::make(
            {.objects = std::move(setup.objects),
             .host_arena = {host_.data(), host_.size()},
             .buffers = {memory_.get(), static_cast<size_t>(setup.buffers * kBytes)},
             .buffer_bytes = kBytes,
             .spare_buffers = setup.spare,
             .verify = setup.verify,
             .parallel = std::move(setup.parallel)},
            *executor_, volume_.get());
    }

    static void fill(const Lease& lease, int value) {
        std::ranges::fill(lease.bytes(), static_cast<std::byte>(value));
    }
    void put(ObjectId id, int value) { fill(store_->acquire(id, Access::overwrite), value); }
    static int value_of(const Lease& lease) {
        const auto bytes = lease.bytes();
        EXPECT_TRUE(std::ranges::all_of(bytes, [&](std::byte b) { return b == bytes[0]; }));
        return static_cast<int>(bytes[0]);
    }
    int get(ObjectId id) { return value_of(store_->acquire(id, Access::read)); }

    // The full text of the error that it throws; empty: none.
    static std::string thrown(Trouble trouble, const std::function<void()>& body) {
        try {
            body();
        } catch (const Error& error) {
            EXPECT_EQ(error.trouble(), trouble) << error.what();
            return error.what();
        }
        return "";
    }
    std::string refused(ObjectId id, Access access, Trouble trouble) {
        return thrown(trouble, [&] { store_->acquire(id, access); });
    }
    void let_time_pass() {
        for (const Nanos until = executor_->now() + 1'000'000'000; executor_->now() < until;)
            executor_->wait(until);
    }

    std::unique_ptr<Executor> executor_;
    std::unique_ptr<aio::SimulatedDisk> disk_;
    std::unique_ptr<aio::Volume> volume_;
    aio::AlignedBuffer memory_ = aio::aligned_buffer(4096, 8 * kBytes);
    std::vector<std::byte> host_ = std::vector<std::byte>(4 * kBytes);
    int64_t slots_ = 0;
    std::unique_ptr<LeasedStore> store_;
};

TEST_F(LeasesTest, AnObjectIsWhatWasLastWrittenToIt) {
    make({.objects = objects_of(7), .buffers = 3});
    for (ObjectId id = 0; id < 7; ++id) put(id, static_cast<int>(id));
    for (int round = 1; round <= 20; ++round) {
        for (const ObjectId id : {6U, 2U, 4U, 0U, 3U, 1U, 5U}) {
            const Lease lease = store_->acquire(id, Access::write);
            ASSERT_EQ(value_of(lease), static_cast<int>(id) + (round - 1) * 7);
            fill(lease, static_cast<int>(id) + round * 7);
        }
    }
}

TEST_F(LeasesTest, WhatIsInABufferCostsNoTransfer) {
    make({});
    put(0, 7);
    store_->flush();
    const int64_t before = disk_->transfers();
    for (int i = 0; i < 100; ++i) EXPECT_EQ(get(0), 7);
    EXPECT_EQ(disk_->transfers(), before);
    EXPECT_EQ(store_->report().hits, 101);
    EXPECT_EQ(store_->report().acquired, 101);
}

TEST_F(LeasesTest, TheOneNotUsedForLongestGoes) {
    make({.buffers = 3});
    for (ObjectId id = 0; id < 3; ++id) put(id, 10);
    store_->flush();
    {
        const Lease held = store_->acquire(0, Access::read);
        get(1);
        get(2);
    }            // 0 was in use until now
    put(3, 10);  // in place of 1
    store_->flush();
    const int64_t before = disk_->transfers();
    for (const ObjectId id : {0U, 2U, 3U}) get(id);
    EXPECT_EQ(disk_->transfers(), before);
    get(1);
    EXPECT_EQ(disk_->transfers(), before + 1);
}

TEST_F(LeasesTest, WhatIsChangedAgainAndAgainIsNotWrittenEachTime) {
    make({.buffers = 4});
    put(0, 0);
    for (int i = 1; i <= 100; ++i) {
        const Lease lease = store_->acquire(0, Access::write);
        ASSERT_EQ(value_of(lease), i - 1);
        fill(lease, i);
    }
    EXPECT_EQ(store_->report().writes, 0);
    store_->flush();
    EXPECT_EQ(store_->report().writes, 1);
    store_->flush();
    EXPECT_EQ(store_->report().writes, 1);
    EXPECT_EQ(get(0), 100);
    EXPECT_EQ(store_->report().reads, 0);
}

TEST_F(LeasesTest, WritesBeginAheadOfNeed) {
    make({.buffers = 4, .spare = 2});
    for (ObjectId id = 0; id < 3; ++id) put(id, 1);
    EXPECT_EQ(store_->report().writes, 1);  // object 0's; one buffer has nothing
    put(3, 1);
    EXPECT_EQ(store_->report().writes, 2);
    const Lease held = store_->acquire(3, Access::read);
    EXPECT_EQ(store_->report().writes, 2);  // 0 and 1 are the spare ones still
    const Lease other = store_->acquire(0, Access::read);
    EXPECT_EQ(store_->report().writes, 3);
}

TEST_F(LeasesTest, AllMayReadOneMayWrite) {
    make({.buffers = 1});
    put(0, 7);
    {
        const Lease first = store_->acquire(0, Access::read);
        const Lease second = store_->acquire(0, Access::read);
        EXPECT_EQ(first.bytes().data(), second.bytes().data());
        const std::string error = refused(0, Access::write, Trouble::usage);
        EXPECT_NE(error.find("object 0"), std::string::npos) << error;
        EXPECT_NE(error.find("2 readers"), std::string::npos) << error;
        EXPECT_NE(refused(0, Access::overwrite, Trouble::usage), "");
        EXPECT_EQ(value_of(first), 7);
    }
    const Lease writer = store_->acquire(0, Access::write);
    for (const Access access : {Access::read, Access::write, Access::overwrite}) {
        const std::string error = refused(0, access, Trouble::usage);
        EXPECT_NE(error.find("a writer"), std::string::npos) << error;
    }
}

TEST_F(LeasesTest, EveryBufferLeasedIsAnErrorAndNoHang) {
    make({});
    for (ObjectId id = 0; id < 3; ++id) put(id, 1);
    Lease first = store_->acquire(0, Access::read);
    const Lease second = store_->acquire(1, Access::write);
    for (const Access access : {Access::read, Access::write, Access::overwrite}) {
        const std::string error = refused(2, access, Trouble::does_not_fit);
        EXPECT_NE(error.find("2 buffers leased"), std::string::npos) << error;
        EXPECT_NE(error.find("2 buffers of 8.00 KiB"), std::string::npos) << error;
    }
    store_->prefetch(2);
    first.give_back();
    EXPECT_EQ(get(2), 1);
    EXPECT_EQ(value_of(second), 1);
}

TEST_F(LeasesTest, ABufferWhoseWriteEndsAtTheLastMomentIsTaken) {
    make({.buffers = 2});
    store_.reset();
    LateVolume late(*volume_);
    store_ = LeasedStore::make(
        {.objects = objects_of(4), .buffers = {memory_.get(), 2 * kBytes}, .buffer_bytes = kBytes},
        *executor_, &late);
    Lease held = store_->acquire(0, Access::overwrite);
    for (int i = 0; i < 10; ++i) {
        put(1, i);
        let_time_pass();
        store_->check();  // a look: the next one is the last before the buffer is asked for
        put(2, i);
        let_time_pass();
        EXPECT_EQ(get(1), i);
    }
    held.give_back();
    store_->flush();
    store_.reset();  // before its volume
}

TEST_F(LeasesTest, ReadersComeWhileItIsWrittenWritersAfter) {
    make({.buffers = 1});
    put(0, 7);
    ASSERT_EQ(store_->report().writes, 1);
    const Nanos begun = executor_->now();
    const auto hits = store_->report().hits;
    EXPECT_EQ(get(0), 7);
    EXPECT_EQ(executor_->now(), begun);
    EXPECT_EQ(store_->report().hits, hits + 1);
    EXPECT_EQ(value_of(store_->acquire(0, Access::write)), 7);
    EXPECT_GT(executor_->now(), begun);
    EXPECT_EQ(store_->report().hits, hits + 1);
}

TEST_F(LeasesTest, PrefetchReadsAhead) {
    make({.objects = objects_of(6), .buffers = 2});
    for (ObjectId id = 0; id < 6; ++id) put(id, static_cast<int>(id));
    store_->flush();
    const auto reads = store_->report().reads;
    const Nanos now = executor_->now();
    const std::vector<ObjectId> next{2, 0};
    store_->prefetch(next);
    EXPECT_EQ(store_->report().reads, reads + 2);
    EXPECT_EQ(executor_->now(), now);
    let_time_pass();
    const auto hits = store_->report().hits;
    EXPECT_EQ(get(2), 2);
    EXPECT_EQ(get(0), 0);
    EXPECT_EQ(store_->report().reads, reads + 2);
    EXPECT_EQ(store_->report().hits, hits + 2);
}

TEST_F(LeasesTest, PrefetchTakesNoBufferThatIsWaitedForOrWanted) {
    make({.objects = objects_of(6), .buffers = 3});
    for (ObjectId id = 0; id < 6; ++id) put(id, static_cast<int>(id));
    store_->flush();
    const Lease held = store_->acquire(5, Access::read);
    const auto reads = store_->report().reads;
    const std::vector<ObjectId> next{0, 1, 2, 3};
    store_->prefetch(next);  // the first two have room
    let_time_pass();
    store_->prefetch(3);
    EXPECT_EQ(store_->report().reads, reads + 2);
    EXPECT_EQ(get(1), 1);
    EXPECT_EQ(get(0), 0);
    EXPECT_EQ(store_->report().reads, reads + 2);
    store_->prefetch(2);
    store_->prefetch(3);
    EXPECT_EQ(store_->report().reads, reads + 4);
    // An acquire takes what was only prefetched.
    EXPECT_EQ(get(4), 4);
    EXPECT_EQ(get(2), 2);
    EXPECT_EQ(get(3), 3);
}

TEST_F(LeasesTest, PrefetchKeepsWhatIsThere) {
    make({.buffers = 3});
    for (ObjectId id = 0; id < 3; ++id) put(id, 1);
    store_->flush();
    store_->prefetch(0);
    put(3, 1);  // in place of 1
    EXPECT_EQ(store_->report().reads, 0);
    get(0);
    EXPECT_EQ(store_->report().reads, 0);
}

TEST_F(LeasesTest, PrefetchOfWhatHasNoContentsDoesNothing) {
    make({});
    store_->prefetch(0);
    EXPECT_EQ(store_->report().reads, 0);
    EXPECT_NE(thrown(Trouble::usage, [&] { store_->prefetch(4); }), "");
}

TEST_F(LeasesTest, MoveAndGiveBackOnce) {
    make({});
    Lease lease = store_->acquire(0, Access::overwrite);
    fill(lease, 7);
    Lease moved = std::move(lease);
    EXPECT_EQ(moved.object(), 0U);
    EXPECT_EQ(value_of(moved), 7);
    EXPECT_NE(refused(0, Access::read, Trouble::usage), "");
    moved = store_->acquire(1, Access::overwrite);  // gives 0 back
    EXPECT_EQ(get(0), 7);
    fill(moved, 8);
    moved.give_back();
    EXPECT_FALSE(moved);
    EXPECT_TRUE(moved.bytes().empty());
    moved.give_back();
    EXPECT_EQ(get(1), 8);
}

TEST_F(LeasesTest, WhatIsAtHomeInHostMemoryIsLeasedInPlace) {
    auto objects = objects_of(2);
    objects[1] = {.home = Home::host, .bytes = kBytes, .offset = 2 * kBytes};
    make({.objects = objects, .buffers = 1});
    host_[2 * kBytes] = std::byte{5};
    const Lease stored = store_->acquire(0, Access::overwrite);
    Lease lease = store_->acquire(1, Access::write);  // needs no buffer
    EXPECT_EQ(lease.bytes().data(), host_.data() + 2 * kBytes);
    EXPECT_EQ(lease.bytes()[0], std::byte{5});
    EXPECT_NE(refused(1, Access::read, Trouble::usage), "");
    fill(lease, 6);
    lease.give_back();
    store_->prefetch(1);
    EXPECT_EQ(get(1), 6);
    EXPECT_EQ(disk_->transfers(), 0);
}

TEST_F(LeasesTest, HostMemoryAloneNeedsNoVolume) {
    executor_ = make_simulated_executor(1);
    store_ = LeasedStore::make({.objects = {{.home = Home::host, .bytes = kBytes}},
                                .host_arena = {host_.data(), host_.size()}},
                               *executor_, nullptr);
    put(0, 7);
    store_->flush();
    EXPECT_EQ(get(0), 7);
    EXPECT_TRUE(store_->revert(0));
}

TEST_F(LeasesTest, SizesNeedNotBeWholeBlocks) {
    auto objects = objects_of(4);
    objects[1].bytes = 1;
    objects[2].bytes = 4097;
    make({.objects = objects, .buffers = 1});
    for (ObjectId id = 0; id < 4; ++id) put(id, 10 + static_cast<int>(id));
    for (ObjectId id = 0; id < 4; ++id) {
        const Lease lease = store_->acquire(id, Access::read);
        EXPECT_EQ(std::ssize(lease.bytes()), objects[id].bytes);
        EXPECT_EQ(value_of(lease), 10 + static_cast<int>(id));
    }
}

TEST_F(LeasesTest, WhatWasNeverWrittenCanOnlyBeOverwritten) {
    make({});
    EXPECT_NE(refused(2, Access::read, Trouble::usage).find("object 2"), std::string::npos);
    EXPECT_NE(refused(2, Access::write, Trouble::usage), "");
    EXPECT_FALSE(store_->revert(2));
    put(2, 7);
    EXPECT_EQ(get(2), 7);
    EXPECT_NE(refused(4, Access::overwrite, Trouble::usage).find("4 objects"), std::string::npos);
}

TEST_F(LeasesTest, OneSpareSlotAndOneOperationAreEnough) {
    for (const int operations : {1, 2}) {
        make({.objects = objects_of(6), .buffers = 3, .slots = 7, .operations_max = operations});
        for (int round = 0; round < 10; ++round) {
            for (ObjectId id = 0; id < 6; ++id) {
                store_->prefetch((id + 1) % 6);
                put(id, round);
            }
            store_->flush();
            for (ObjectId id = 0; id < 6; ++id) {
                store_->prefetch((id + 1) % 6);
                ASSERT_EQ(get(id), round);
            }
        }
    }
}

TEST_F(LeasesTest, FlushLeavesOutWhatIsBeingWritten) {
    make({.buffers = 4});
    put(0, 7);
    const Lease reader = store_->acquire(0, Access::read);
    Lease writer = store_->acquire(1, Access::overwrite);
    store_->flush();
    EXPECT_EQ(store_->report().writes, 1);
    writer.give_back();
    store_->flush();
    EXPECT_EQ(store_->report().writes, 2);
}

// ---------------------------------------------------------------- failures

TEST_F(LeasesTest, AFailedWriteLeavesTheContentsBefore) {
    make({.disk = {.seed = 1, .fault = aio::Fault::enospc, .fault_at = 1}});
    put(0, 7);
    store_->flush();
    put(0, 8);
    const std::string flushed = thrown(Trouble::io, [&] { store_->flush(); });
    EXPECT_NE(flushed.find("object 0"), std::string::npos) << flushed;
    EXPECT_NE(flushed.find("simulated"), std::string::npos) << flushed;
    EXPECT_EQ(thrown(Trouble::io, [&] { store_->check(); }), flushed);
    EXPECT_EQ(refused(0, Access::read, Trouble::io), flushed);
    EXPECT_EQ(refused(0, Access::write, Trouble::io), flushed);
    put(1, 1);  // the others go on
    EXPECT_EQ(get(1), 1);
    EXPECT_TRUE(store_->revert(0));
    store_->check();
    EXPECT_EQ(get(0), 7);
    put(0, 9);
    store_->flush();
    EXPECT_EQ(get(0), 9);
}

TEST_F(LeasesTest, NewContentsMakeUpForThoseLost) {
    make({.disk = {.seed = 1, .fault = aio::Fault::eio, .fault_at = 0}});
    put(0, 7);
    EXPECT_NE(thrown(Trouble::io, [&] { store_->flush(); }), "");
    put(0, 8);
    store_->flush();
    EXPECT_EQ(get(0), 8);
}

TEST_F(LeasesTest, AFirstWriteThatFailsLeavesNothing) {
    make({.disk = {.seed = 1, .fault = aio::Fault::eio, .fault_at = 0}});
    put(0, 7);
    EXPECT_NE(thrown(Trouble::io, [&] { store_->flush(); }), "");
    EXPECT_FALSE(store_->revert(0));
    EXPECT_NE(refused(0, Access::read, Trouble::usage), "");
}

TEST_F(LeasesTest, AReaderKeepsWhatCouldNotBeWritten) {
    make({.buffers = 1, .disk = {.seed = 1, .fault = aio::Fault::eio, .fault_at = 1}});
    put(0, 7);
    store_->flush();
    put(0, 8);
    Lease reader = store_->acquire(0, Access::read);
    EXPECT_NE(thrown(Trouble::io, [&] { store_->flush(); }), "");
    EXPECT_EQ(value_of(reader), 8);
    EXPECT_NE(refused(0, Access::read, Trouble::io), "");
    EXPECT_NE(thrown(Trouble::usage, [&] { store_->revert(0); }), "");
    reader.give_back();
    store_->revert(0);
    EXPECT_EQ(get(0), 7);
}

TEST_F(LeasesTest, TheFirstFailureIsTold) {
    make({.buffers = 3, .disk = {.seed = 1, .fault = aio::Fault::vanish, .fault_at = 0}});
    const auto expect = [&](const char* object) {
        const std::string error = thrown(Trouble::io, [&] { store_->flush(); });
        EXPECT_NE(error.find(object), std::string::npos) << error;
    };
    for (const ObjectId id : {1U, 0U, 2U}) {
        put(id, 1);
        expect("object 1");
    }
    store_->revert(1);
    expect("object 0");
    store_->revert(0);
    expect("object 2");
    store_->revert(2);
    store_->flush();
}

TEST_F(LeasesTest, AFailedReadIsReadAgain) {
    make({.buffers = 1, .disk = {.seed = 1, .fault = aio::Fault::eio, .fault_at = 2}});
    put(0, 7);
    put(1, 8);
    store_->flush();
    const std::string error = refused(0, Access::read, Trouble::io);
    EXPECT_NE(error.find("object 0"), std::string::npos) << error;
    EXPECT_EQ(get(0), 7);
}

TEST_F(LeasesTest, AFailedReadLeavesItsBufferToTheNext) {
    make({.buffers = 3, .disk = {.seed = 1, .fault = aio::Fault::eio, .fault_at = 4}});
    for (ObjectId id = 0; id < 4; ++id) put(id, 1);
    store_->flush();
    EXPECT_NE(refused(0, Access::read, Trouble::io), "");
    get(0);
    const auto reads = store_->report().reads;
    get(2);
    get(3);
    EXPECT_EQ(store_->report().reads, reads);
}

TEST_F(LeasesTest, OfAPrefetchThatFailsNothingIsHeard) {
    make({.buffers = 1, .disk = {.seed = 1, .fault = aio::Fault::eio, .fault_at = 2}});
    put(0, 7);
    put(1, 8);
    store_->flush();
    store_->prefetch(0);
    let_time_pass();
    store_->check();
    EXPECT_EQ(disk_->injected(aio::Fault::eio), 1);
    const auto reads = store_->report().reads;
    store_->prefetch(0);
    EXPECT_EQ(store_->report().reads, reads + 1);
    EXPECT_EQ(get(0), 7);
    EXPECT_EQ(store_->report().reads, reads + 1);
}

TEST_F(LeasesTest, WrongBytesAreNotLeased) {
    for (const bool verify : {true, false}) {
        make({.buffers = 1,
              .verify = verify,
              .disk = {.seed = 1, .fault = aio::Fault::lost_write, .fault_at = 0}});
        put(0, 7);
        put(1, 8);
        if (verify) {
            const std::string error = refused(0, Access::write, Trouble::io);
            EXPECT_NE(error.find("not those written"), std::string::npos) << error;
            EXPECT_NE(error.find("object 0"), std::string::npos) << error;
        } else {
            EXPECT_NE(get(0), 7);  // the check is what finds it
        }
        EXPECT_EQ(get(1), 8);
    }
}

TEST_F(LeasesTest, SeveralThreadsMayHash) {
    const int64_t bytes = 3 * aio::kPieceBytes;
    int64_t bodies = 0;
    executor_ = make_simulated_executor(1);
    disk_ = std::make_unique<aio::SimulatedDisk>(aio::SimulatedDiskOptions{}, *executor_);
    volume_ = aio::open_simulated_volume(
        {.paths = {{.path = "simulated"}}, .classes = {{"state", bytes, 3}}, .write_once = false},
        *executor_, *disk_);
    const auto memory = aio::aligned_buffer(4096, bytes);
    store_ = LeasedStore::make({.objects = objects_of(2, bytes),
                                .buffers = {memory.get(), static_cast<size_t>(bytes)},
                                .parallel =
                                    [&](int64_t count, const auto& body) {
                                        for (int64_t i = count; i-- > 0; ++bodies) body(i);
                                    }},
                               *executor_, volume_.get());
    put(0, 7);
    put(1, 8);
    EXPECT_EQ(get(0), 7);
    store_->flush();
    EXPECT_EQ(bodies, 3 * 3);  // two sealed, one verified
    store_.reset();
}

// ---------------------------------------------------------------- beginning and end

TEST_F(LeasesTest, SlotsAreFreeAgainAfterTheStore) {
    make({});
    for (int round = 0; round < 3; ++round)
        for (ObjectId id = 0; id < 4; ++id) put(id, round);
    store_.reset();  // with writes under way
    for (int64_t slot = 0; slot < slots_; ++slot) EXPECT_NE(volume_->allocate(0), aio::kNoSlot);
    EXPECT_EQ(volume_->allocate(0), aio::kNoSlot);
}

TEST_F(LeasesTest, ALeaseThatOutlivesItsStoreIsABug) {
    make({});
    const Lease lease = store_->acquire(0, Access::overwrite);
    EXPECT_DEATH(store_.reset(), "a lease outlives its store");
}

TEST_F(LeasesTest, WhatCannotWorkIsRefused) {
    const auto refuses = [&](Trouble trouble, const std::string& part,
                             const std::function<void(LeasedStoreOptions&)>& change) {
        LeasedStoreOptions options{.objects = objects_of(4),
                                   .host_arena = {host_.data(), host_.size()},
                                   .buffers = {memory_.get(), 2 * kBytes}};
        change(options);
        const std::string error = thrown(
            trouble, [&] { LeasedStore::make(std::move(options), *executor_, volume_.get()); });
        EXPECT_NE(error.find(part), std::string::npos) << part << ": " << error;
    };
    make({.slots = 5});
    store_.reset();
    using Options = LeasedStoreOptions;
    refuses(Trouble::usage, "no bytes", [](Options& o) { o.objects[1].bytes = 0; });
    refuses(Trouble::usage, "slot class", [](Options& o) { o.objects[1].slot_class = -1; });
    refuses(Trouble::usage, "a slot", [](Options& o) { o.objects[1].bytes = kBytes + 1; });
    refuses(Trouble::usage, "object 1", [](Options& o) { o.objects[1].bytes = kBytes + 1; });
    refuses(Trouble::usage, "a buffer", [](Options& o) { o.buffer_bytes = 4096; });
    refuses(Trouble::usage, "aligned", [](Options& o) { o.buffer_bytes = kBytes + 512; });
    refuses(Trouble::usage, "start", [](Options& o) { o.buffers = o.buffers.subspan(512); });
    refuses(Trouble::usage, "spare", [](Options& o) { o.spare_buffers = -1; });
    refuses(Trouble::does_not_fit, "single buffer",
            [](Options& o) { o.buffers = o.buffers.first(kBytes - 1); });
    refuses(Trouble::does_not_fit, "6: one for each object",
            [](Options& o) { o.objects.push_back(o.objects[0]); });
    for (const int64_t offset : {int64_t{-1}, 3 * kBytes + 1, int64_t{1} << 62})
        refuses(Trouble::usage, "arena", [&](Options& o) {
            o.objects[1] = {.home = Home::host, .bytes = kBytes, .offset = offset};
        });
    refuses(Trouble::usage, "volume", [&](Options&) { volume_.reset(); });
}

}  // namespace
}  // namespace ferry::swap
