// The promises of every volume, whatever moves its bytes: uring and posix on a disk and on tmpfs,
// and the simulated disk.
#include <gtest/gtest.h>
#include <sched.h>
#include <stdlib.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <filesystem>
#include <mutex>
#include <set>

#include "ferry/aio.h"
#include "tests/support/loop_device.h"
#include "tests/support/simulated_disk.h"
#include "tests/support/temporary_directory.h"

namespace ferry::aio {
namespace {

struct Where {
    const char* name;
    BackendKind kind;
    const char* directory;  // null: simulated
    int rings = 1, files = 0;
    enum { none, sqpoll, iopoll, raw, buffered } special = none;
};

const Where kWhere[] = {
    {"uring_disk", BackendKind::uring, "/var/tmp"},
    {"uring_disk_rings", BackendKind::uring, "/var/tmp", 2, 3},
    {"uring_tmpfs", BackendKind::uring, "/dev/shm"},
    {"uring_disk_buffered", BackendKind::uring, "/var/tmp", 1, 0, Where::buffered},
    {"uring_disk_sqpoll", BackendKind::uring, "/var/tmp", 1, 0, Where::sqpoll},
    {"uring_tmpfs_sqpoll", BackendKind::uring, "/dev/shm", 2, 0, Where::sqpoll},
    {"uring_disk_iopoll", BackendKind::uring, "/var/tmp", 1, 0, Where::iopoll},
    {"uring_loop_device", BackendKind::uring, "/var/tmp", 2, 0, Where::raw},
    {"posix_loop_device", BackendKind::posix, "/var/tmp", 1, 0, Where::raw},
    {"posix_disk", BackendKind::posix, "/var/tmp"},
    {"posix_tmpfs_rings", BackendKind::posix, "/dev/shm", 3, 2},
    {"sim", BackendKind::automatic, nullptr},
    {"sim_rings", BackendKind::automatic, nullptr, 3, 2},
};

std::byte pattern(uint64_t version, size_t at) {
    return static_cast<std::byte>((version * 1000003 + at / 8) * 0x9E3779B97F4A7C15u >>
                                  (at % 8 * 8));
}

class Memory {
public:
    explicit Memory(int64_t bytes)
        : data_(static_cast<std::byte*>(std::aligned_alloc(4096, static_cast<size_t>(bytes)))),
          bytes_(static_cast<size_t>(bytes)) {
        memset(data_, 0, bytes_);
    }
    ~Memory() { std::free(data_); }
    Memory(const Memory&) = delete;
    Memory& operator=(const Memory&) = delete;
    std::span<std::byte> span() { return {data_, bytes_}; }
    void fill(uint64_t version) {
        for (size_t i = 0; i < bytes_; ++i) data_[i] = pattern(version, i);
    }
    // The first byte that is not the pattern's, or -1.
    int64_t mismatch(uint64_t version) const {
        for (size_t i = 0; i < bytes_; ++i)
            if (data_[i] != pattern(version, i)) return static_cast<int64_t>(i);
        return -1;
    }

private:
    std::byte* data_;
    size_t bytes_;
};

constexpr int64_t kSlotBytes = 3 * 64 * kKiB + 4096;  // not a multiple of the block
constexpr int64_t kSlots = 12;

class VolumeContract : public testing::TestWithParam<Where> {
protected:
    void SetUp() override {
        const Where& where = GetParam();
        if (where.directory && where.kind == BackendKind::uring && !why_no_uring().empty())
            GTEST_SKIP() << "no io_uring here: " << why_no_uring();
        if (!where.directory) {
            executor_ = make_simulated_executor(7);
            disk_ = std::make_unique<SimulatedDisk>(SimulatedDiskOptions{.seed = 7}, *executor_);
            return;
        }
        executor_ = make_thread_executor();
        std::string name = std::string(where.directory) + "/ferry-test-XXXXXX";
        ASSERT_TRUE(mkdtemp(name.data()));
        directory_ = name;
        if (where.special != Where::raw) return;
        device_ = std::make_unique<LoopDevice>(directory_ + ".image", 128 * kMiB);
        if (!device_->why_not().empty()) GTEST_SKIP() << device_->why_not();
    }
    void TearDown() override {
        volume_.reset();
        if (directory_.empty()) return;
        std::filesystem::remove(directory_ + ".image");
        EXPECT_TRUE(std::filesystem::is_empty(directory_)) << "the volume left files behind";
        std::filesystem::remove_all(directory_);
    }

    VolumeOptions options() const {
        const Where& where = GetParam();
        return {.paths = {{.path = device_ ? device_->name() : directory_,
                           .size_bytes = 64 * kMiB,
                           .raw_device = device_ != nullptr,
                           .files = where.files}},
                .classes = {{"a", kSlotBytes, kSlots}, {"b", 4096, 3}},
                .backend = where.kind,
                .block_bytes = 64 * kKiB,
                .queue_depth = 8,
                .operations_max = 64,
                .rings = where.rings,
                .direct = where.special != Where::buffered,
                .sqpoll = where.special == Where::sqpoll,
                .iopoll = where.special == Where::iopoll};
    }
    Volume& open(VolumeOptions volume_options) {
        volume_ = disk_ ? open_simulated_volume(std::move(volume_options), *executor_, *disk_)
                        : Volume::open(std::move(volume_options), *executor_);
        return *volume_;
    }
    Operation* next() {
        while (true) {
            if (Operation* operation = volume_->poll()) return operation;
            executor_->wait(kForever);
        }
    }
    void run(Operation& operation) {
        volume_->submit(operation);
        EXPECT_EQ(next(), &operation);
        EXPECT_EQ(operation.state, State::done);
        EXPECT_EQ(operation.done_bytes, static_cast<int64_t>(operation.buffer.size()));
        EXPECT_EQ(operation.error, 0);
    }

    std::string directory_;
    std::unique_ptr<Executor> executor_;
    std::unique_ptr<SimulatedDisk> disk_;
    std::unique_ptr<LoopDevice> device_;
    std::unique_ptr<Volume> volume_;
};

TEST_P(VolumeContract, EveryByteOfEverySlotComesBack) {
    Volume& volume = open(options());
    EXPECT_EQ(volume.slot_bytes(0), kSlotBytes);
    std::vector<SlotId> slots;
    std::vector<std::unique_ptr<Memory>> memory;
    std::vector<Operation> operations(kSlots);
    for (size_t i = 0; i < kSlots; ++i) {
        slots.push_back(volume.allocate(0));
        memory.push_back(std::make_unique<Memory>(kSlotBytes));
        memory[i]->fill(i);
        operations[i] = {.kind = Kind::write, .slot = slots[i], .buffer = memory[i]->span()};
        volume.submit(operations[i]);
    }
    EXPECT_EQ(volume.in_flight(), kSlots);
    for (int i = 0; i < kSlots; ++i) EXPECT_EQ(next()->state, State::done);
    for (auto& one : memory) memset(one->span().data(), 0, one->span().size());
    for (Operation& operation : operations) {
        operation.kind = Kind::read;
        volume.submit(operation);
    }
    for (int i = 0; i < kSlots; ++i) {
        const Operation* operation = next();
        EXPECT_EQ(operation->state, State::done);
        EXPECT_GE(operation->finished_ns, operation->submitted_ns);
    }
    for (size_t i = 0; i < kSlots; ++i) EXPECT_EQ(memory[i]->mismatch(i), -1);
    EXPECT_EQ(volume.in_flight(), 0);
    const PathCounters counters = volume.counters()[0];
    EXPECT_EQ(counters.bytes_read, kSlots * kSlotBytes);
    EXPECT_EQ(counters.bytes_written, kSlots * kSlotBytes);
    EXPECT_GE(counters.bytes_overhead, kSlots * kSlotBytes + 3 * 4096) << "the layout's";
    EXPECT_EQ(counters.reads, kSlots * ceil_div(kSlotBytes, 64 * kKiB));
    EXPECT_EQ(counters.errors, 0);
}

TEST_P(VolumeContract, ConflictingOperationsKeepTheirOrder) {
    Volume& volume = open(options());
    const SlotId slot = volume.allocate(0);
    constexpr size_t kRounds = 10;
    std::vector<std::unique_ptr<Memory>> written, read;
    std::vector<Operation> operations(2 * kRounds);
    for (size_t i = 0; i < kRounds; ++i) {
        written.push_back(std::make_unique<Memory>(kSlotBytes));
        read.push_back(std::make_unique<Memory>(kSlotBytes));
        written[i]->fill(100 + i);
        // The read has the higher priority, and must not overtake all the same.
        operations[2 * i] = {.kind = Kind::write,
                             .priority = Priority::background,
                             .slot = slot,
                             .buffer = written[i]->span()};
        operations[2 * i + 1] = {.kind = Kind::read,
                                 .priority = Priority::urgent,
                                 .slot = slot,
                                 .buffer = read[i]->span()};
    }
    for (Operation& operation : operations) volume.submit(operation);
    for (Operation& operation : operations) EXPECT_EQ(next(), &operation);
    for (size_t i = 0; i < kRounds; ++i) EXPECT_EQ(read[i]->mismatch(100 + i), -1) << i;
}

TEST_P(VolumeContract, PartsOfASlotAreWrittenAlone) {
    Volume& volume = open(options());
    const SlotId slot = volume.allocate(0);
    Memory all(kSlotBytes), part(8192);
    all.fill(1);
    part.fill(2);
    Operation write{.kind = Kind::write, .slot = slot, .buffer = all.span()};
    Operation patch{
        .kind = Kind::write, .slot = slot, .offset = 64 * kKiB - 4096, .buffer = part.span()};
    Operation read{.kind = Kind::read, .slot = slot, .buffer = all.span()};
    run(write);
    run(patch);
    run(read);
    for (size_t i = 0; i < all.span().size(); ++i) {
        const size_t begin = 64 * kKiB - 4096;
        const std::byte expected =
            i >= begin && i < begin + 8192 ? pattern(2, i - begin) : pattern(1, i);
        ASSERT_EQ(all.span()[i], expected) << i;
    }
}

TEST_P(VolumeContract, SlotsAreDistinctAndReturn) {
    Volume& volume = open(options());
    std::set<SlotId> slots;
    std::set<std::string> places;
    for (int i = 0; i < kSlots; ++i) {
        const SlotId slot = volume.allocate(0);
        ASSERT_NE(slot, kNoSlot);
        slots.insert(slot);
        places.insert(volume.describe(slot));
    }
    EXPECT_EQ(volume.allocate(0), kNoSlot);
    EXPECT_NE(volume.allocate(1), kNoSlot) << "classes do not share slots";
    EXPECT_EQ(slots.size(), static_cast<size_t>(kSlots));
    EXPECT_EQ(places.size(), static_cast<size_t>(kSlots));
    volume.free(*slots.begin());
    EXPECT_EQ(volume.allocate(0), *slots.begin());
}

TEST_P(VolumeContract, CancelledOperationsAllComeBack) {
    Volume& volume = open(options());
    const SlotId slot = volume.allocate(0);
    std::vector<Operation> operations(40);
    Memory memory(kSlotBytes);
    memory.fill(3);
    for (Operation& operation : operations) {
        operation = {.kind = Kind::write, .slot = slot, .buffer = memory.span()};
        volume.submit(operation);
    }
    volume.cancel_queued();
    volume.cancel_queued();
    Operation after{.kind = Kind::write, .slot = slot, .buffer = memory.span()};
    volume.submit(after);
    int cancelled = 0;
    for (size_t i = 0; i < operations.size(); ++i) {
        const Operation* operation = next();
        ASSERT_NE(operation, &after);
        ASSERT_TRUE(operation->state == State::done || operation->state == State::cancelled);
        cancelled += operation->state == State::cancelled;
    }
    if (disk_) {
        EXPECT_GT(cancelled, 0);  // a real kernel may have been faster
    }
    EXPECT_EQ(next(), &after);
    EXPECT_EQ(after.state, State::done);
    Memory back(kSlotBytes);
    Operation read{.kind = Kind::read, .slot = slot, .buffer = back.span()};
    run(read);
    EXPECT_EQ(back.mismatch(3), -1);
}

TEST_P(VolumeContract, ClosesWithOperationsUnderWay) {
    open(options());
    const SlotId slot = volume_->allocate(0);
    Memory memory(30 * 8192);
    std::vector<Operation> operations(30);
    for (size_t i = 0; i < operations.size(); ++i) {
        Operation& operation = operations[i];
        operation = {
            .kind = Kind::read, .slot = slot, .buffer = memory.span().subspan(i * 8192, 8192)};
        volume_->submit(operation);
    }
    volume_.reset();
    for (const Operation& operation : operations) EXPECT_NE(operation.state, State::queued);
}

TEST_P(VolumeContract, FlushKeepsFinishedOperationsForPoll) {
    Volume& volume = open(options());
    Memory memory(kSlotBytes);
    Operation write{.kind = Kind::write, .slot = volume.allocate(0), .buffer = memory.span()};
    volume.submit(write);
    volume.flush();
    EXPECT_EQ(volume.in_flight(), 1);
    executor_->wait(kForever);  // must not sleep: something waits to be polled
    EXPECT_EQ(volume.poll(), &write);
    volume.flush();
    EXPECT_EQ(volume.poll(), nullptr);
}

TEST_P(VolumeContract, DiscardSparesWhatIsInUse) {
    Volume& volume = open(options());
    const SlotId kept = volume.allocate(0), freed = volume.allocate(0);
    Memory memory(kSlotBytes);
    memory.fill(9);
    for (const SlotId slot : {kept, freed}) {
        Operation write{.kind = Kind::write, .slot = slot, .buffer = memory.span()};
        run(write);
    }
    volume.free(freed);
    volume.discard_free_slots();
    Memory back(kSlotBytes);
    Operation read{.kind = Kind::read, .slot = kept, .buffer = back.span()};
    run(read);
    EXPECT_EQ(back.mismatch(9), -1);
    const SlotId again = volume.allocate(0);
    ASSERT_EQ(again, freed);
    Operation write{.kind = Kind::write, .slot = again, .buffer = memory.span()};
    run(write);
}

TEST_P(VolumeContract, RegisteredAndPlainBuffersMixInOneVolume) {
    Memory slab(kMiB), plain(kSlotBytes);
    VolumeOptions wanted = options();
    wanted.registered = {slab.span()};
    Volume& volume = open(std::move(wanted));
    const auto inside = slab.span().subspan(4096, kSlotBytes);
    for (size_t i = 0; i < inside.size(); ++i) inside[i] = pattern(5, i);
    const SlotId slot = volume.allocate(0);
    Operation write{.kind = Kind::write, .slot = slot, .buffer = inside};
    Operation read{.kind = Kind::read, .slot = slot, .buffer = plain.span()};
    run(write);
    run(read);
    EXPECT_EQ(plain.mismatch(5), -1);
    memset(inside.data(), 0, inside.size());
    write.buffer = plain.span();
    read.buffer = inside;
    run(write);
    run(read);
    EXPECT_EQ(memcmp(inside.data(), plain.span().data(), inside.size()), 0);
}

TEST_P(VolumeContract, FilledToTheLimitManyTimes) {
    Volume& volume = open(options());
    std::vector<Operation> operations(64);
    std::vector<std::unique_ptr<Memory>> memory;
    std::vector<SlotId> slots;
    for (int i = 0; i < kSlots; ++i) slots.push_back(volume.allocate(0));
    for (size_t i = 0; i < operations.size(); ++i) {
        memory.push_back(std::make_unique<Memory>(4096));
        operations[i].buffer = memory.back()->span();
    }
    for (int round = 0; round < 20; ++round) {
        for (size_t i = 0; i < operations.size(); ++i) {
            operations[i].kind = i % 3 == 0 ? Kind::write : Kind::read;
            operations[i].slot = slots[i % slots.size()];
            operations[i].offset = static_cast<int64_t>(i % 5) * 4096;
            volume.submit(operations[i]);
        }
        for (size_t i = 0; i < operations.size(); ++i) ASSERT_EQ(next()->state, State::done);
        ASSERT_EQ(volume.poll(), nullptr);
    }
}

// Back-pressure: what does not fit is not taken, and fits again after a poll.
TEST_P(VolumeContract, AFullQueueTakesNoMore) {
    VolumeOptions wanted = options();
    wanted.operations_max = 3;
    Volume& volume = open(std::move(wanted));
    const SlotId slot = volume.allocate(0);
    Memory memory(kSlotBytes);
    std::vector<Operation> operations(4);
    for (Operation& operation : operations)
        operation = {.kind = Kind::write, .slot = slot, .buffer = memory.span()};
    for (size_t i = 0; i < 3; ++i) EXPECT_TRUE(volume.try_submit(operations[i]));
    Operation& last = operations.back();
    EXPECT_FALSE(volume.try_submit(last));
    EXPECT_EQ(last.state, State::idle);
    EXPECT_EQ(volume.in_flight(), 3);
    EXPECT_EQ(next(), &operations[0]);
    EXPECT_TRUE(volume.try_submit(last));
    for (size_t i = 1; i < 4; ++i) EXPECT_EQ(next(), &operations[i]);
}

// A tracer is called on the ring's thread.
TEST(Rings, RunOnTheCoresOfTheirPath) {
    cpu_set_t allowed;
    ASSERT_EQ(sched_getaffinity(0, sizeof allowed, &allowed), 0);
    int last = CPU_SETSIZE - 1;
    while (!CPU_ISSET(static_cast<size_t>(last), &allowed)) --last;
    const TemporaryDirectory directory;
    std::atomic<int> elsewhere = 0, transfers = 0;
    struct Seen {
        int core;
        std::atomic<int>&elsewhere, &transfers;
    } seen{last, elsewhere, transfers};
    const auto executor = make_thread_executor();
    const auto volume =
        Volume::open({.paths = {{.path = directory.path(), .files = 1, .cores = {last}}},
                      .classes = {{"a", 4096, 8}},
                      .tracer = {.transfer =
                                     [](void* context, const TransferTrace&) {
                                         auto& s = *static_cast<Seen*>(context);
                                         ++s.transfers;
                                         s.elsewhere += sched_getcpu() != s.core;
                                     },
                                 .context = &seen}},
                     *executor);
    EXPECT_GT(transfers, 0);  // the layout's
    EXPECT_EQ(elsewhere, 0);
}

// A tracer hears of every transfer once, with its place, its bytes and its time.
struct Traced {
    std::mutex mutex;
    std::vector<TransferTrace> transfers;
};

TEST_P(VolumeContract, EveryTransferIsTraced) {
    Traced traced;
    VolumeOptions wanted = options();
    wanted.tracer = {.transfer =
                         [](void* context, const TransferTrace& trace) {
                             auto& all = *static_cast<Traced*>(context);
                             const std::lock_guard lock(all.mutex);
                             all.transfers.push_back(trace);
                         },
                     .context = &traced};
    Volume& volume = open(std::move(wanted));
    const SlotId slot = volume.allocate(0);
    Memory memory(kSlotBytes);
    const size_t layout = traced.transfers.size();  // nothing is under way
    EXPECT_EQ(layout, static_cast<size_t>(volume.counters()[0].writes));
    Operation write{.kind = Kind::write, .slot = slot, .buffer = memory.span(), .tag = 77};
    const Nanos before = executor_->now();
    Operation read{.kind = Kind::read, .slot = slot, .buffer = memory.span(), .tag = 78};
    run(write);
    volume.flush();
    run(read);
    const Nanos after = executor_->now();
    volume_.reset();
    // Where several workers copy: into memory or the page cache, on a machine of four cores.
    const Where& where = GetParam();
    const bool may_be_whole = where.directory && (where.special == Where::buffered ||
                                                  where.directory == std::string("/dev/shm"));
    int64_t read_bytes = 0, written_bytes = 0, flushes = 0;
    std::set<int64_t> read_at, written_at;
    for (size_t i = layout; i < traced.transfers.size(); ++i) {
        const TransferTrace& one = traced.transfers[i];
        EXPECT_EQ(one.error, 0);
        EXPECT_EQ(one.path, 0);
        EXPECT_GE(one.start_ns, before);
        EXPECT_LE(one.start_ns, one.end_ns);
        EXPECT_LE(one.end_ns, after);
        flushes += one.verb == Verb::flush;
        if (one.verb != Verb::write && one.verb != Verb::read) continue;
        const bool writes = one.verb == Verb::write;
        EXPECT_EQ(one.tag, writes ? 77u : 78u);
        (writes ? written_bytes : read_bytes) += one.bytes;
        (writes ? written_at : read_at).insert(one.offset);
        if (!writes || !may_be_whole) {
            EXPECT_LE(one.bytes, 64 * kKiB);
        }
    }
    EXPECT_EQ(read_bytes, kSlotBytes);
    EXPECT_EQ(written_bytes, kSlotBytes);
    EXPECT_EQ(read_at.size(), 4u);
    if (!may_be_whole || written_at.size() != 1) {
        EXPECT_EQ(written_at.size(), 4u);
    }
    EXPECT_GE(flushes, 1);
}

TEST_P(VolumeContract, TheLayoutCanWaitForTheFirstContents) {
    VolumeOptions wanted = options();
    wanted.lays_out_later = true;
    Volume& volume = open(std::move(wanted));
    Memory memory(kSlotBytes);
    memory.fill(3);
    const SlotId slot = volume.allocate(0);
    Operation write{.kind = Kind::write, .slot = slot, .buffer = memory.span()};
    run(write);
    const int64_t before = volume.counters()[0].bytes_overhead;
    volume.finish_layout();
    const int64_t after = volume.counters()[0].bytes_overhead;
    EXPECT_GE(after - before, (kSlots - 1) * kSlotBytes) << "every slot but the one written";
    EXPECT_LT(after - before, kSlots * kSlotBytes);
    memset(memory.span().data(), 0, memory.span().size());
    Operation read{.kind = Kind::read, .slot = slot, .buffer = memory.span()};
    run(read);
    EXPECT_EQ(memory.mismatch(3), -1);
    volume.finish_layout();
    EXPECT_EQ(volume.counters()[0].bytes_overhead, after) << "once";
}

TEST_P(VolumeContract, TheLayoutSparesWhatWasWrittenAndNothingElse) {
    VolumeOptions wanted = options();
    wanted.lays_out_later = true;
    Volume& volume = open(std::move(wanted));
    constexpr int64_t kHalf = 24 * 4096;
    Memory start(4096), end(kHalf), queued(kSlotBytes);
    start.fill(1);
    end.fill(2);
    Operation first{.kind = Kind::write, .slot = volume.allocate(0), .buffer = start.span()};
    Operation second{.kind = Kind::write,
                     .slot = volume.allocate(0),
                     .offset = kSlotBytes - kHalf,
                     .buffer = end.span()};
    run(first);
    run(second);
    Operation cancelled{.kind = Kind::write, .slot = volume.allocate(0), .buffer = queued.span()};
    volume.submit(cancelled);
    volume.cancel_queued();
    EXPECT_EQ(next(), &cancelled);
    const bool was_done = cancelled.state == State::done;  // a real kernel may have been faster
    EXPECT_FALSE(disk_ && was_done);
    const int64_t before = volume.counters()[0].bytes_overhead;
    volume.finish_layout();
    const int64_t filled = kSlots * kSlotBytes + 3 * 4096 - kHalf - 4096 -
                           (was_done ? kSlotBytes : 0) + (disk_ ? 0 : kHeaderBytes);
    EXPECT_EQ(volume.counters()[0].bytes_overhead - before, filled);
    for (Operation* read : {&first, &second}) {
        read->kind = Kind::read;
        memset(read->buffer.data(), 0, read->buffer.size());
        run(*read);
    }
    EXPECT_EQ(start.mismatch(1), -1);
    EXPECT_EQ(end.mismatch(2), -1);
}

TEST_P(VolumeContract, WearIsTheShareOfTheDrivesLife) {
    VolumeOptions wanted = options();
    wanted.paths[0].endurance_tbw = 1e-3;  // a gigabyte, a short life
    Volume& volume = open(std::move(wanted));
    Memory memory(kSlotBytes);
    Operation write{.kind = Kind::write, .slot = volume.allocate(0), .buffer = memory.span()};
    run(write);
    PathCounters counters = volume.counters()[0];
    EXPECT_EQ(counters.bytes_written, kSlotBytes);
    EXPECT_GE(counters.bytes_overhead, kSlots * kSlotBytes + 3 * 4096);
    EXPECT_DOUBLE_EQ(counters.endurance_used,
                     static_cast<double>(kSlotBytes + counters.bytes_overhead) / 1e9);
    counters.bytes_overhead = kMiB;  // what probing wrote depends on the place
    counters.endurance_used = 0.0024;
    counters.write_bytes_per_s = 1.25e9;
    const std::string words = describe({&counters, 1});
    EXPECT_NE(words.find(": 0 B read, 196.00 KiB written at 1.25 GB/s, 1.00 MiB besides to lay it "
                         "out, 0.24 % of its rated life"),
              std::string::npos)
        << words;
    counters.endurance_used = 1.2;
    EXPECT_NE(describe({&counters, 1}).find(", 120 % of its rated life"), std::string::npos);
    const PathCounters two[] = {counters, {.path = "/b", .bytes_read = 5, .bytes_written = kMiB}};
    EXPECT_NE(describe(two, "- ").find("\n- /b: 5 B read, 1.00 MiB written\n- all paths: 5 B read, "
                                       "1.19 MiB written, 1.00 MiB besides to lay it out"),
              std::string::npos)
        << describe(two, "- ");
}

TEST_P(VolumeContract, MisusesAreBugs) {
    if (!disk_) GTEST_SKIP() << "a process that aborts would leave its files behind";
    Volume& volume = open(options());
    const SlotId slot = volume.allocate(0);
    Memory memory(kSlotBytes + 4096);
    const auto submit = [&](Operation operation) { volume.submit(operation); };
    const auto buffer = memory.span();
    EXPECT_DEATH(submit({.slot = slot, .offset = 4096, .buffer = buffer}), "outside its slot");
    EXPECT_DEATH(submit({.slot = slot, .offset = 512, .buffer = buffer.first(4096)}),
                 "not aligned");
    EXPECT_DEATH(submit({.slot = slot, .buffer = buffer.subspan(8, 4096)}), "not aligned");
    EXPECT_DEATH(submit({.slot = slot + 1, .buffer = buffer.first(4096)}), "not in use");
    EXPECT_DEATH(volume.free(slot + 1), "not in use");
    VolumeOptions later = options();
    later.lays_out_later = true;
    const auto finish_too_soon = [&] {
        const auto other = open_simulated_volume(later, *executor_, *disk_);
        Operation read{.slot = other->allocate(0), .buffer = buffer.first(4096)};
        other->submit(read);
        other->finish_layout();
    };
    EXPECT_DEATH(finish_too_soon(), "operations are under way");
    std::vector<Operation> many(65, {.slot = slot, .buffer = buffer.first(4096)});
    EXPECT_DEATH(std::ranges::for_each(many, [&](Operation& one) { volume.submit(one); }),
                 "more operations");
}

INSTANTIATE_TEST_SUITE_P(All, VolumeContract, testing::ValuesIn(kWhere),
                         [](const auto& param_info) { return param_info.param.name; });

}  // namespace
}  // namespace ferry::aio
