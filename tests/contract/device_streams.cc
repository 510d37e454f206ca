// The contract of a device's streams, for every kind that this machine has.
#include <gtest/gtest.h>

#include <cstring>

#include "ferry/device.h"

namespace ferry {
namespace {

class DeviceContract : public testing::Test {
protected:
    std::unique_ptr<Executor> executor_ = make_thread_executor();
    std::unique_ptr<Device> device_ = Device::open(DeviceKind::cpu, 1 * kMiB, *executor_);
    std::atomic<uint64_t> counter_ = 0;

    void wait_for(uint64_t value) {
        while (counter_.load(std::memory_order_acquire) < value) executor_->wait(kForever);
    }
};

TEST_F(DeviceContract, HasTheMemoryAskedFor) {
    EXPECT_GE(device_->memory().size(), static_cast<size_t>(kMiB));
    EXPECT_EQ(reinterpret_cast<uintptr_t>(device_->memory().data()) % 4096, 0u);
}

TEST_F(DeviceContract, CopiesRunInOrderOnAStream) {
    std::vector<std::byte> a(4096, std::byte{1}), b(4096), c(4096);
    Stream& up = device_->stream(StreamKind::h2d);
    up.copy(device_->memory().data(), a.data(), 4096);
    up.copy(b.data(), device_->memory().data(), 4096);
    up.copy(c.data(), b.data(), 4096);
    up.signal(counter_);
    wait_for(1);
    EXPECT_EQ(a, c);
}

TEST_F(DeviceContract, SignalsComeAfterTheWorkBeforeThem) {
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

TEST_F(DeviceContract, CudaIsRefusedWhereItWasNotBuilt) {
    EXPECT_THROW(Device::open(DeviceKind::cuda, 4096, *executor_), Error);
}

}  // namespace
}  // namespace ferry
