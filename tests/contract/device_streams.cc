// The contract of a device's streams, for every kind that this machine has.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "ferry/device.h"
#include "ferry/units.h"

namespace ferry {
namespace {

class DeviceContract : public testing::TestWithParam<DeviceKind> {
protected:
    void SetUp() override {
        try {
            device_ = Device::open(GetParam(), *executor_);
        } catch (const Error& error) {
            if (GetParam() == DeviceKind::cpu) throw;
            GTEST_SKIP() << error.what();
        }
        device_->reserve(kMiB);
    }

    std::unique_ptr<Executor> executor_ = make_thread_executor();
    std::unique_ptr<Device> device_;
    std::atomic<uint64_t> counter_ = 0;

    void wait_for(uint64_t value) {
        while (counter_.load(std::memory_order_acquire) < value) executor_->wait(kForever);
    }
};

TEST_P(DeviceContract, HasTheMemoryAskedForAndItIsZero) {
    EXPECT_GE(device_->memory().size(), static_cast<size_t>(kMiB));
    std::vector<std::byte> seen(kMiB, std::byte{1});
    Stream& down = device_->stream(StreamKind::d2h);
    down.copy(seen.data(), device_->memory().data(), kMiB);
    down.signal(counter_);
    wait_for(1);
    EXPECT_EQ(seen, std::vector<std::byte>(kMiB));
    EXPECT_EQ(reinterpret_cast<uintptr_t>(device_->memory().data()) % 4096, 0u);
}

TEST_P(DeviceContract, CopiesRunInOrderOnAStream) {
    std::vector<std::byte> a(4096, std::byte{1}), b(4096), c(4096);
    Stream& up = device_->stream(StreamKind::h2d);
    up.copy(device_->memory().data(), a.data(), 4096);
    up.copy(b.data(), device_->memory().data(), 4096);
    up.copy(c.data(), b.data(), 4096);
    up.signal(counter_);
    wait_for(1);
    EXPECT_EQ(a, c);
}

TEST_P(DeviceContract, SignalsComeAfterTheWorkBeforeThem) {
    static std::atomic<int> ran;
    ran = 0;
    Stream& compute = device_->stream(StreamKind::compute);
    for (int i = 0; i < 300; ++i) {
        compute.launch({[](void*, uint64_t) { ran.fetch_add(1); }});
        compute.signal(counter_);
        wait_for(static_cast<uint64_t>(i) + 1);
        EXPECT_EQ(ran.load(), i + 1);
    }
}

struct Pause {
    Stream& stream;
    Nanos duration;
    Job job() {
        return {[](void* context, uint64_t) {
                    const Pause& pause = *static_cast<const Pause*>(context);
                    pause.stream.pause(pause.duration);
                },
                this};
    }
};

TEST_P(DeviceContract, APauseHoldsUpWhatFollowsOnItsStream) {
    Stream& compute = device_->stream(StreamKind::compute);
    std::vector<std::byte> seen(4096, std::byte{7});
    Pause pause{compute, Nanos{30'000'000}};
    const Nanos start = executor_->now();
    compute.launch(pause.job());
    compute.launch(pause.job());
    compute.copy(seen.data(), device_->memory().data(), 4096);
    compute.signal(counter_);
    wait_for(1);
    EXPECT_GE(executor_->now() - start, 2 * pause.duration);
    EXPECT_EQ(seen, std::vector<std::byte>(4096));
}

// Longer and longer pauses: on a busy machine a copy may take its time.
TEST_P(DeviceContract, OtherStreamsAndTheCallerPassAPause) {
    std::vector<std::byte> up(4096, std::byte{7}), down(4096);
    std::atomic<uint64_t> paused = 0;
    uint64_t pauses = 0, copies = 0;
    for (Nanos duration = 50'000'000;; duration *= 2) {
        ASSERT_LT(duration, Nanos{30'000'000'000}) << "nothing ever overtook a pause";
        Pause pause{device_->stream(StreamKind::compute), duration};
        pause.stream.launch(pause.job());
        pause.stream.signal(paused);
        device_->stream(StreamKind::h2d).copy(device_->memory().data(), up.data(), 4096);
        device_->stream(StreamKind::h2d).signal(counter_);
        wait_for(++copies);
        device_->stream(StreamKind::d2h).copy(down.data(), device_->memory().data(), 4096);
        device_->stream(StreamKind::d2h).signal(counter_);
        wait_for(++copies);
        EXPECT_EQ(down, up);
        const bool overtaken = paused.load(std::memory_order_acquire) == pauses++;
        while (paused.load(std::memory_order_acquire) < pauses) executor_->wait(kForever);
        if (overtaken) return;
    }
}

// Host memory that is page-locked in pieces; copies that lie across them.
TEST_P(DeviceContract, CopiesCrossLockedPieces) {
    constexpr size_t kPiece = 64 * kKiB, kPieces = 4;
    auto* memory = static_cast<std::byte*>(std::aligned_alloc(4096, kPiece * kPieces));
    const std::span<std::byte> host(memory, kPiece * kPieces);
    for (size_t i = 0; i < host.size(); ++i) host[i] = static_cast<std::byte>(i * 7 / 5);
    const std::vector<std::byte> before(host.begin(), host.end());
    for (size_t i = 0; i < kPieces; ++i) device_->lock_pages(host.subspan(i * kPiece, kPiece));
    Stream& up = device_->stream(StreamKind::h2d);
    const auto size = static_cast<int64_t>(host.size());
    up.copy(device_->memory().data(), host.data() + 100, size - 200);
    up.signal(counter_);
    wait_for(1);
    std::ranges::fill(host, std::byte{0});
    Stream& down = device_->stream(StreamKind::d2h);
    down.copy(host.data() + 100, device_->memory().data(), size - 200);
    down.signal(counter_);
    wait_for(2);
    EXPECT_TRUE(std::equal(host.begin() + 100, host.end() - 100, before.begin() + 100));
    EXPECT_EQ(host[99], std::byte{0});
    for (size_t i = 0; i < kPieces; ++i) device_->unlock_pages(host.subspan(i * kPiece, kPiece));
    std::free(memory);
}

TEST_P(DeviceContract, ManySignalsOnAllStreams) {
    for (uint64_t round = 0; round < 100; ++round) {
        for (int i = 0; i < kStreams; ++i)
            device_->stream(static_cast<StreamKind>(i)).signal(counter_);
        wait_for((round + 1) * kStreams);
    }
    EXPECT_NO_THROW(device_->check());
}

TEST_P(DeviceContract, AnotherArenaTakesThePlaceOfTheLast) {
    Stream& down = device_->stream(StreamKind::d2h);
    std::vector<std::byte> seen(2 * kMiB, std::byte{1});
    down.copy(device_->memory().data(), seen.data(), kMiB);
    down.signal(counter_);
    wait_for(1);
    device_->reserve(2 * kMiB);
    ASSERT_GE(device_->memory().size(), seen.size());
    down.copy(seen.data(), device_->memory().data(), 2 * kMiB);
    down.signal(counter_);
    wait_for(2);
    EXPECT_EQ(std::ranges::count(seen, std::byte{0}), std::ssize(seen));
}

TEST_P(DeviceContract, AnArenaThatDoesNotFitIsRefused) {
    const auto other = Device::open(GetParam(), *executor_);
    EXPECT_THROW(other->reserve(int64_t{1} << 50), Error);
}

TEST(Device, CudaIsRefusedWithAReasonWhereThereIsNone) {
    const auto executor = make_thread_executor();
    try {
        Device::open(DeviceKind::cuda, *executor);
        GTEST_SKIP() << "there is a GPU";
    } catch (const Error& error) {
        EXPECT_EQ(error.trouble(), Trouble::usage);
        EXPECT_NE(error.problem().remedy.find("device cpu"), std::string::npos) << error.what();
    }
}

INSTANTIATE_TEST_SUITE_P(All, DeviceContract, testing::Values(DeviceKind::cpu, DeviceKind::cuda),
                         [](const auto& test) {
                             return test.param == DeviceKind::cpu ? "cpu" : "cuda";
                         });

}  // namespace
}  // namespace ferry
