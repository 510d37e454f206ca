// The queue against a backend that answers from a script: every count, every errno, every order.
#include "queue.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cerrno>
#include <deque>
#include <map>

namespace ferry::aio {
namespace {

constexpr int32_t kAll = INT32_MAX;  // in a script: every byte asked for

class ScriptedBackend final : public Backend {
public:
    std::string_view name() const noexcept override { return "scripted"; }
    int submit(std::span<const Transfer> batch) override {
        const size_t taken = std::min<size_t>(batch.size(), static_cast<size_t>(accept));
        for (const Transfer& transfer : batch.first(taken)) {
            flying.push_back(transfer);
            seen.push_back(transfer);
        }
        return static_cast<int>(taken);
    }
    int reap(std::span<Completion> out, Nanos until) override {
        slept_until = until;
        if (hold) return 0;
        size_t count = 0;
        for (; count < out.size() && !flying.empty(); ++count) {
            const Transfer transfer = flying.front();
            flying.pop_front();
            int32_t result = kAll;
            if (!script.empty()) {
                result = script.front();
                script.pop_front();
            }
            if (result == kAll) result = static_cast<int32_t>(transfer.size_bytes);
            out[count] = {transfer.id, result};
        }
        return static_cast<int>(count);
    }
    void wake() noexcept override {}
    Nanos now() const noexcept override { return time; }

    std::deque<int32_t> script;
    std::deque<Transfer> flying;
    std::vector<Transfer> seen;
    int accept = 1000;
    bool hold = false;
    Nanos time = 1, slept_until = 0;
};

// Counts how often the step thread is woken.
class CountingExecutor final : public Executor {
public:
    LaneId add_lane(std::string, int) override { return 0; }
    void host(Service&) override {}
    void retire(Service&) override {}
    void post(LaneId, Job) override {}
    void wait(Nanos) override {}
    void wake() noexcept override { ++wakes; }
    Nanos now() const noexcept override { return 0; }

    int wakes = 0;
};

class QueueTest : public testing::Test {
protected:
    void make(QueueOptions options) {
        auto backend = std::make_unique<ScriptedBackend>();
        backend_ = backend.get();
        options.slots = 16;
        queue_ = std::make_unique<Queue>(std::move(options), std::move(backend), *executor_);
    }
    void SetUp() override {
        make({.name = "q",
              .depth = 4,
              .operations_max = 8,
              .block_bytes = 16384,
              .alignment = 4096});
    }
    Operation& operation(Kind kind, SlotId slot, int64_t bytes,
                         Priority priority = Priority::normal) {
        operations_.push_back(
            std::make_unique<Operation>(Operation{.kind = kind,
                                                  .priority = priority,
                                                  .slot = slot,
                                                  .buffer = {memory_, static_cast<size_t>(bytes)},
                                                  .state = State::queued}));
        return *operations_.back();
    }
    void submit(Operation& op) {
        queue_->submit({.operation = &op,
                        .verb = op.kind == Kind::read ? Verb::read : Verb::write,
                        .file_offset = int64_t{op.slot} * 1048576 + op.offset,
                        .size_bytes = static_cast<int64_t>(op.buffer.size())});
    }
    // Runs until something finished; time passes as the queue asks.
    Operation* finish() {
        for (int turns = 0; turns < 1000; ++turns) {
            if (Operation* op = queue_->poll()) return op;
            queue_->run_once(kForever);
            if (backend_->flying.empty() && backend_->slept_until != kForever)
                backend_->time = std::max(backend_->time + 1, backend_->slept_until);
        }
        return nullptr;
    }

    alignas(4096) static inline std::byte memory_[1 << 20];
    std::unique_ptr<CountingExecutor> executor_ = std::make_unique<CountingExecutor>();
    ScriptedBackend* backend_ = nullptr;
    std::unique_ptr<Queue> queue_;
    std::vector<std::unique_ptr<Operation>> operations_;
};

TEST_F(QueueTest, SmallOperationsAreToldTogetherOthersAtOnce) {
    // Eight operations, one at a time, `pause` after each.
    const auto wakes = [&](int64_t bytes, Priority priority, Nanos pause) {
        make({.name = "q", .depth = 1, .operations_max = 8, .block_bytes = kMiB});
        executor_->wakes = 0;
        for (SlotId slot = 0; slot < 8; ++slot)
            submit(operation(Kind::read, slot, bytes, priority));
        for (int i = 0; i < 8; ++i) {
            queue_->run_once(kForever);
            if (executor_->wakes == 0) {
                EXPECT_LE(queue_->next_event(), 50'000);
            }
            backend_->time += pause;
        }
        return executor_->wakes;
    };
    EXPECT_EQ(wakes(4096, Priority::normal, 1), 2) << "nothing left to start; the last one";
    EXPECT_EQ(wakes(4096, Priority::urgent, 1), 8);
    EXPECT_EQ(wakes(65536, Priority::normal, 1), 8);
    EXPECT_EQ(wakes(4096, Priority::background, 60'000), 8) << "nobody waits longer than 50 us";
}

TEST_F(QueueTest, WritesWholeWhereAskedTo) {
    make({.name = "q",
          .depth = 4,
          .operations_max = 8,
          .block_bytes = 16384,
          .whole_writes = true,
          .alignment = 4096});
    Operation& write = operation(Kind::write, 1, 40960);
    submit(write);
    ASSERT_EQ(finish(), &write);
    ASSERT_EQ(backend_->seen.size(), 1u);
    EXPECT_EQ(backend_->seen[0].size_bytes, 40960);
    EXPECT_EQ(write.done_bytes, 40960);
    Operation& read = operation(Kind::read, 1, 40960);
    submit(read);
    ASSERT_EQ(finish(), &read);
    EXPECT_EQ(backend_->seen.size(), 4u) << "reads are copied side by side";
}

TEST_F(QueueTest, SplitsByBlock) {
    Operation& op = operation(Kind::write, 1, 40960);
    submit(op);
    ASSERT_EQ(finish(), &op);
    ASSERT_EQ(backend_->seen.size(), 3u);
    EXPECT_EQ(backend_->seen[2].offset, 1048576 + 32768);
    EXPECT_EQ(backend_->seen[2].size_bytes, 8192);
    EXPECT_EQ(backend_->seen[2].data, memory_ + 32768);
    EXPECT_EQ(op.done_bytes, 40960);
}

TEST_F(QueueTest, ShortCountsResumeAtWholeBlocks) {
    backend_->script = {-EINTR, 512, 4096, 0, 4100, kAll};
    Operation& op = operation(Kind::read, 0, 16384);
    submit(op);
    ASSERT_EQ(finish(), &op);
    EXPECT_EQ(op.state, State::done);
    EXPECT_EQ(op.done_bytes, 16384);
    std::vector<int64_t> offsets;
    for (const Transfer& transfer : backend_->seen) {
        offsets.push_back(transfer.offset);
        EXPECT_EQ(transfer.offset + transfer.size_bytes, 16384);
        EXPECT_EQ(transfer.data, memory_ + transfer.offset);
    }
    EXPECT_EQ(offsets, (std::vector<int64_t>{0, 0, 0, 4096, 4096, 8192}));
    EXPECT_EQ(queue_->counters().bytes_read, 16384);
    EXPECT_EQ(queue_->counters().bytes_retried, 512 + 4);
}

TEST_F(QueueTest, ZeroProgressEndsAsEio) {
    backend_->script.assign(1000, 0);
    Operation& op = operation(Kind::read, 0, 4096);
    submit(op);
    ASSERT_EQ(finish(), &op);
    EXPECT_EQ(op.state, State::failed);
    EXPECT_EQ(op.error, EIO);
    EXPECT_LT(backend_->seen.size(), 30u);
}

TEST_F(QueueTest, LessThanABlockIsNoProgress) {
    backend_->script.assign(1000, 4095);
    Operation& op = operation(Kind::write, 0, 8192);
    submit(op);
    ASSERT_EQ(finish(), &op);
    EXPECT_EQ(op.error, EIO);
}

TEST_F(QueueTest, RetriesAreBoundedAndRest) {
    backend_->script.assign(1000, -EAGAIN);
    Operation& op = operation(Kind::write, 0, 4096);
    submit(op);
    ASSERT_EQ(finish(), &op);
    EXPECT_EQ(op.state, State::failed);
    EXPECT_EQ(op.error, EAGAIN);
    EXPECT_LT(backend_->seen.size(), 30u);
    EXPECT_NEAR(static_cast<double>(backend_->time), 1.255e9, 1e6)
        << "rests of an overloaded device";
}

TEST_F(QueueTest, RetriesStartAgainAfterProgress) {
    for (int block = 0; block < 4; ++block) {
        for (int i = 0; i < 10; ++i) backend_->script.push_back(i % 2 ? -EINTR : -EAGAIN);
        backend_->script.push_back(4096);
    }
    Operation& op = operation(Kind::write, 0, 16384);
    submit(op);
    ASSERT_EQ(finish(), &op);
    EXPECT_EQ(op.state, State::done);
}

struct Row {
    int error;
    ErrorClass error_class;
};
constexpr Row kRows[] = {
    {EINTR, ErrorClass::retry},    {EAGAIN, ErrorClass::retry},   {EINVAL, ErrorClass::bug},
    {EBADF, ErrorClass::bug},      {EFAULT, ErrorClass::bug},     {EIO, ErrorClass::fail},
    {ENOSPC, ErrorClass::fail},    {EDQUOT, ErrorClass::fail},    {EFBIG, ErrorClass::fail},
    {EROFS, ErrorClass::fail},     {ENODEV, ErrorClass::fail},    {ENXIO, ErrorClass::fail},
    {ENOMEM, ErrorClass::fail},    {ETIMEDOUT, ErrorClass::fail}, {EOPNOTSUPP, ErrorClass::fail},
    {ECANCELED, ErrorClass::fail},
};

class ErrnoSwitch : public QueueTest, public testing::WithParamInterface<Row> {};

TEST_P(ErrnoSwitch, Row) {
    const Row row = GetParam();
    EXPECT_EQ(classify(Verb::write, row.error), row.error_class);
    backend_->script = {-row.error};
    Operation& op = operation(Kind::write, 0, 8192);
    submit(op);
    if (row.error_class == ErrorClass::bug) {
        EXPECT_DEATH(finish(), "built wrong");
        return;
    }
    ASSERT_EQ(finish(), &op);
    EXPECT_EQ(op.state, row.error_class == ErrorClass::retry ? State::done : State::failed);
    EXPECT_EQ(op.error, row.error_class == ErrorClass::retry ? 0 : row.error);
    // The queue itself is unharmed.
    Operation& after = operation(Kind::write, 0, 8192);
    submit(after);
    ASSERT_EQ(finish(), &after);
    EXPECT_EQ(after.state, State::done);
}

INSTANTIATE_TEST_SUITE_P(Errors, ErrnoSwitch, testing::ValuesIn(kRows),
                         [](const auto& row) { return "errno" + std::to_string(row.param.error); });

TEST_F(QueueTest, BuffersStayOwnedUntilAllTransfersAreReaped) {
    backend_->hold = true;
    Operation& op = operation(Kind::write, 0, 4 * 16384);
    submit(op);
    queue_->run_once(kForever);
    ASSERT_EQ(backend_->flying.size(), 4u);
    // The first one fails while three are under way.
    backend_->hold = false;
    backend_->script = {-EIO};
    const std::deque<Transfer> rest(backend_->flying.begin() + 1, backend_->flying.end());
    backend_->flying.resize(1);
    queue_->run_once(kForever);
    EXPECT_EQ(queue_->poll(), nullptr) << "given back while the kernel still has the buffer";
    for (size_t i = 0; i < rest.size(); ++i) {
        EXPECT_EQ(queue_->poll(), nullptr);
        backend_->flying = {rest[i]};
        queue_->run_once(kForever);
    }
    ASSERT_EQ(queue_->poll(), &op);
    EXPECT_EQ(op.state, State::failed);
    EXPECT_EQ(op.error, EIO);
    EXPECT_EQ(op.done_bytes, 3 * 16384);
    EXPECT_EQ(queue_->counters().errors, 1);
}

TEST_F(QueueTest, NothingMoreIsIssuedAfterAnError) {
    backend_->script = {-ENOSPC};
    Operation& op = operation(Kind::write, 0, 40 * 16384);
    submit(op);
    ASSERT_EQ(finish(), &op);
    EXPECT_EQ(op.error, ENOSPC);
    EXPECT_LE(backend_->seen.size(), 8u);
}

TEST_F(QueueTest, PartialSubmissionOffersTheRestAgain) {
    backend_->accept = 1;
    Operation& op = operation(Kind::write, 0, 8 * 16384);
    submit(op);
    ASSERT_EQ(finish(), &op);
    EXPECT_EQ(op.done_bytes, 8 * 16384);
    EXPECT_EQ(backend_->seen.size(), 8u);
}

TEST_F(QueueTest, RefusedSubmissionDoesNotSleep) {
    backend_->accept = 0;
    Operation& op = operation(Kind::write, 0, 4096);
    submit(op);
    queue_->run_once(kForever);
    EXPECT_EQ(backend_->slept_until, 0);
    backend_->accept = 1;
    ASSERT_EQ(finish(), &op);
}

TEST_F(QueueTest, DepthBoundsAllOperationsTogether) {
    backend_->hold = true;
    for (SlotId slot = 0; slot < 8; ++slot) submit(operation(Kind::read, slot, 8192));
    queue_->run_once(kForever);
    EXPECT_EQ(backend_->flying.size(), 4u) << "several small operations fill the depth";
    backend_->hold = false;
    for (int i = 0; i < 8; ++i) ASSERT_NE(finish(), nullptr);
}

TEST_F(QueueTest, MoreThanTheLimitIsABug) {
    backend_->hold = true;
    const auto overfill = [&] {
        for (int i = 0; i < 40; ++i) {
            submit(operation(Kind::read, 0, 4096));
            queue_->run_once(0);
        }
    };
    EXPECT_DEATH(overfill(), "operations_max");
}

TEST_F(QueueTest, UrgentOvertakesBackground) {
    backend_->hold = true;
    submit(operation(Kind::write, 0, 4 * 16384));  // fills the depth
    queue_->run_once(kForever);
    Operation& background = operation(Kind::write, 1, 4096, Priority::background);
    Operation& normal = operation(Kind::write, 2, 4096, Priority::normal);
    Operation& urgent = operation(Kind::read, 3, 4096, Priority::urgent);
    submit(background), submit(normal), submit(urgent);
    queue_->run_once(kForever);
    backend_->hold = false;
    finish();
    EXPECT_EQ(finish(), &urgent);
    EXPECT_EQ(finish(), &normal);
    EXPECT_EQ(finish(), &background);
}

TEST_F(QueueTest, AnUrgentReadLiftsTheWriteItWaitsFor) {
    backend_->hold = true;
    submit(operation(Kind::write, 0, 4 * 16384));
    queue_->run_once(kForever);
    Operation& other = operation(Kind::write, 1, 4096, Priority::background);
    Operation& write = operation(Kind::write, 2, 4096, Priority::background);
    Operation& normal = operation(Kind::write, 3, 4096, Priority::normal);
    Operation& read = operation(Kind::read, 2, 4096, Priority::urgent);
    submit(other), submit(write), submit(normal), submit(read);
    backend_->hold = false;
    finish();
    EXPECT_EQ(finish(), &write) << "before `normal`, which has the higher priority of its own";
    EXPECT_EQ(finish(), &normal);
    EXPECT_EQ(finish(), &other);
    EXPECT_EQ(finish(), &read);
}

TEST_F(QueueTest, ReadsShareASlotAndWritesDoNot) {
    backend_->hold = true;
    submit(operation(Kind::read, 5, 4096));
    submit(operation(Kind::read, 5, 4096));
    submit(operation(Kind::write, 5, 4096));
    submit(operation(Kind::read, 5, 4096));
    queue_->run_once(kForever);
    ASSERT_EQ(backend_->flying.size(), 2u);
    EXPECT_EQ(backend_->flying[0].verb, Verb::read);
    EXPECT_EQ(backend_->flying[1].verb, Verb::read);
    backend_->hold = false;
    for (auto& op : operations_) EXPECT_EQ(finish(), op.get());
}

TEST_F(QueueTest, DisjointPartsOfASlotDoNotWait) {
    backend_->hold = true;
    Operation& first = operation(Kind::write, 5, 4096);
    Operation& second = operation(Kind::write, 5, 4096);
    second.offset = 4096;
    submit(first), submit(second);
    queue_->run_once(kForever);
    EXPECT_EQ(backend_->flying.size(), 2u);
    backend_->hold = false;
    finish(), finish();
}

TEST_F(QueueTest, AFailureUnblocksWhatWaited) {
    backend_->script = {-EIO, kAll};
    Operation& write = operation(Kind::write, 5, 4096);
    Operation& read = operation(Kind::read, 5, 4096);
    submit(write), submit(read);
    ASSERT_EQ(finish(), &write);
    EXPECT_EQ(write.state, State::failed);
    ASSERT_EQ(finish(), &read);
    EXPECT_EQ(read.state, State::done);
}

TEST_F(QueueTest, CancelSparesWhatHasStarted) {
    backend_->hold = true;
    Operation& started = operation(Kind::write, 0, 8 * 16384);  // twice the depth
    Operation& waiting = operation(Kind::write, 1, 4096);
    Operation& blocked = operation(Kind::write, 0, 4096);
    submit(started), submit(waiting), submit(blocked);
    queue_->run_once(kForever);
    queue_->cancel();
    Operation& later = operation(Kind::write, 1, 4096);
    submit(later);
    backend_->hold = false;
    EXPECT_EQ(finish(), &waiting);
    EXPECT_EQ(waiting.state, State::cancelled);
    EXPECT_EQ(finish(), &blocked);
    EXPECT_EQ(blocked.state, State::cancelled);
    EXPECT_EQ(finish(), &started);
    EXPECT_EQ(started.state, State::done);
    EXPECT_EQ(started.done_bytes, 8 * 16384);
    EXPECT_EQ(finish(), &later);
    EXPECT_EQ(later.state, State::done);
}

TEST_F(QueueTest, FlushAndDiscardAreOnePieceAndRetry) {
    backend_->script = {-EINTR, -EINTR, 0, 0};
    Operation flush, discard;
    queue_->submit({.operation = &flush, .verb = Verb::flush, .owner = Owner::volume});
    queue_->submit({.operation = &discard,
                    .verb = Verb::discard,
                    .owner = Owner::volume,
                    .file_offset = 8192,
                    .size_bytes = 10 * 16384});
    for (int i = 0; i < 5; ++i) queue_->run_once(kForever);
    EXPECT_EQ(queue_->finished(), 2);
    EXPECT_EQ(queue_->poll(), nullptr) << "the volume's own do not reach the caller";
    EXPECT_EQ(flush.state, State::done);
    EXPECT_EQ(discard.state, State::done);
    EXPECT_EQ(backend_->seen.size(), 4u);
    for (const Transfer& transfer : backend_->seen)
        EXPECT_EQ(transfer.size_bytes, transfer.verb == Verb::discard ? 10 * 16384 : 0);
}

TEST_F(QueueTest, ADiscardThatIsNotSupportedIsNoBug) {
    EXPECT_EQ(classify(Verb::discard, EINVAL), ErrorClass::fail);
    EXPECT_EQ(classify(Verb::discard, EOPNOTSUPP), ErrorClass::fail);
    EXPECT_EQ(classify(Verb::flush, EINVAL), ErrorClass::bug);
}

TEST_F(QueueTest, SpeedIsThatOfAFullRing) {
    // 4 x 16 KiB every 1 ms while the ring is full.
    for (int round = 0; round < 300; ++round) {
        Operation& op = operation(Kind::read, 0, 4 * 16384);
        submit(op);
        backend_->hold = true;
        queue_->run_once(kForever);  // issues
        backend_->time += 1'000'000;
        backend_->hold = false;
        ASSERT_EQ(finish(), &op);
    }
    const QueueCounters counters = queue_->counters();
    EXPECT_NEAR(counters.read_bytes_per_s, 4 * 16384 * 1e3, 4 * 16384 * 20.0);
    EXPECT_EQ(counters.write_bytes_per_s, 0);
}

}  // namespace
}  // namespace ferry::aio
