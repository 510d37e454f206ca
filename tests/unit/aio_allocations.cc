// Nothing is allocated once a volume is open, in the caller's thread or in a ring's.
#include <gtest/gtest.h>

#include <cstring>

#include "aio/buffer.h"
#include "backend.h"
#include "ferry/aio.h"
#include "tests/support/count_allocations.h"
#include "tests/support/temporary_directory.h"

#ifndef FERRY_HEAP_IS_TAKEN

namespace ferry::aio {
namespace {

constexpr int64_t kSlotBytes = 64 * kKiB;
constexpr size_t kSlots = 80;  // more free ones than one batch of discards takes

class AioAllocations : public testing::TestWithParam<BackendKind> {
protected:
    void SetUp() override {
        if (GetParam() == BackendKind::uring && !why_no_uring().empty())
            GTEST_SKIP() << "no io_uring here: " << why_no_uring();
        volume_ = Volume::open({.paths = {{.path = directory_.path(), .files = 3}},
                                .classes = {{"a", kSlotBytes, kSlots}},
                                .backend = GetParam(),
                                .block_bytes = 16384,
                                .queue_depth = 8,
                                .operations_max = 16,
                                .rings = 2},
                               *executor_);
    }
    // Writes and reads a slot on each of the files.
    void move() {
        SlotId slots[3];
        for (SlotId& slot : slots) slot = volume_->allocate(0);
        for (const Kind kind : {Kind::write, Kind::read}) {
            for (size_t i = 0; i < 3; ++i) {
                operations_[i] = {
                    .kind = kind, .slot = slots[i], .buffer = {memory_.get(), kSlotBytes}};
                volume_->submit(operations_[i]);
            }
            for (int back = 0; back < 3;) {
                const Operation* operation = volume_->poll();
                if (!operation) {
                    executor_->wait(kForever);
                    continue;
                }
                ++back;
                ASSERT_EQ(operation->state, State::done);
            }
        }
        for (const SlotId slot : slots) volume_->free(slot);
    }

    TemporaryDirectory directory_;
    std::unique_ptr<Executor> executor_ = make_thread_executor();
    AlignedBuffer memory_ = aligned_buffer(4096, kSlotBytes);
    Operation operations_[3];
    std::unique_ptr<Volume> volume_;
};

TEST_P(AioAllocations, OfMovingAreNone) {
    EXPECT_EQ(allocations_of([&] { move(); }), 0);
    EXPECT_EQ(allocations_of([&] { volume_->cancel_queued(); }), 0);
}

TEST_P(AioAllocations, OfFlushAndDiscardAreNone) {
    EXPECT_EQ(allocations_of([&] { volume_->flush(); }), 0);
    EXPECT_EQ(allocations_of([&] { volume_->discard_free_slots(); }), 0);
    move();
}

TEST_P(AioAllocations, AreCounted) {
    EXPECT_GE(allocations_of([&] { volume_->counters(); }), 10);
}

INSTANTIATE_TEST_SUITE_P(On, AioAllocations,
                         testing::Values(BackendKind::uring, BackendKind::posix),
                         [](const auto& kind) {
                             return kind.param == BackendKind::uring ? "uring" : "posix";
                         });

}  // namespace
}  // namespace ferry::aio

#else

TEST(AioAllocations, OfMovingAreNone) { GTEST_SKIP() << "a sanitizer holds the heap"; }

#endif
