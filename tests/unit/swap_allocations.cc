// Leases on real files: what comes back is what was written, and nothing is allocated once the
// store is made.
#include <gtest/gtest.h>

#include <algorithm>

#include "aio/buffer.h"
#include "ferry/lease.h"
#include "tests/support/count_allocations.h"
#include "tests/support/temporary_directory.h"

namespace ferry::swap {
namespace {

constexpr int64_t kBytes = aio::kPieceBytes + 4096;
constexpr ObjectId kObjects = 7;

class LeasesOnFiles : public testing::TestWithParam<aio::BackendKind> {
protected:
    void SetUp() override {
        for (ObjectId id = 0; id < kObjects; ++id) {
            const Lease lease = store_->acquire(id, Access::overwrite);
            std::ranges::fill(lease.bytes(), std::byte{0});
        }
    }
    // Each object is changed, in an order that the store is told of as it goes.
    void go_round() {
        for (ObjectId i = 0; i < kObjects; ++i) {
            const auto at = [&](ObjectId n) { return n * 3 % kObjects; };
            store_->prefetch(at(i + 1));
            Lease lease = store_->acquire(at(i), Access::write);
            ASSERT_TRUE(std::ranges::all_of(lease.bytes(),
                                            [&](std::byte b) { return b == lease.bytes()[0]; }));
            ASSERT_EQ(static_cast<uint8_t>(lease.bytes()[0]), static_cast<uint8_t>(rounds_));
            std::ranges::fill(lease.bytes(), static_cast<std::byte>(rounds_ + 1));
        }
        ++rounds_;
    }

    TemporaryDirectory directory_;
    std::unique_ptr<Executor> executor_ = make_thread_executor();
    aio::AlignedBuffer memory_ = aio::aligned_buffer(4096, 3 * kBytes);
    std::unique_ptr<aio::Volume> volume_ =
        aio::Volume::open({.paths = {{.path = directory_.path()}},
                           .classes = {{"state", kBytes, kObjects + 3}},
                           .backend = GetParam()},
                          *executor_);
    std::unique_ptr<LeasedStore> store_ = LeasedStore::make(
        {.objects = {kObjects, LeasedObject{.home = Home::nvme, .bytes = kBytes, .slot_class = 0}},
         .buffers = {memory_.get(), 3 * kBytes}},
        *executor_, volume_.get());
    int rounds_ = 0;
};

TEST_P(LeasesOnFiles, HoldWhatWasWritten) {
    for (int round = 0; round < 20; ++round) go_round();
    store_->flush();
    EXPECT_GT(store_->report().reads, kObjects * 10);
    EXPECT_GT(store_->report().writes, kObjects * 10);
}

#ifndef FERRY_HEAP_IS_TAKEN
TEST_P(LeasesOnFiles, AllocateNothing) {
    EXPECT_EQ(allocations_of([&] { go_round(); }), 0);
    EXPECT_EQ(allocations_of([&] { store_->flush(); }), 0);
    EXPECT_GE(allocations_of([&] { volume_->counters(); }), 10);  // they are counted
}
#endif

INSTANTIATE_TEST_SUITE_P(On, LeasesOnFiles,
                         testing::Values(aio::BackendKind::automatic, aio::BackendKind::posix),
                         [](const auto& kind) {
                             return kind.param == aio::BackendKind::posix ? "posix" : "automatic";
                         });

}  // namespace
}  // namespace ferry::swap
