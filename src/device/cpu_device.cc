// A device made of a memory arena and three threads. It gives everything above it the shape of a
// GPU (budgeted memory, ordered streams, completion by signal) on a machine without one.
#include "cpu_device.h"

#include <sys/mman.h>

#include <array>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <limits>
#include <thread>
#include <vector>

#include "base/process_limits.h"
#include "ferry/units.h"

namespace ferry {
namespace {

class CpuStream final : public Stream {
public:
    CpuStream(Executor& executor, std::string name)
        : executor_(executor), lane_(executor.add_lane(std::move(name), kDepth)), copies_(kDepth) {}

    void launch(Job job) override { executor_.post(lane_, job); }

    void pause(Nanos duration) override {
        if (!executor_.simulated()) std::this_thread::sleep_for(std::chrono::nanoseconds(duration));
    }

    void copy(void* destination, const void* source, int64_t bytes) override {
        // The lane holds at most kDepth unfinished jobs, so the descriptor reused here is done
        // with.
        Copy& next = copies_[next_copy_++ % kDepth];
        next = {destination, source, bytes};
        executor_.post(lane_, {[](void* context, uint64_t) {
                                   const Copy& c = *static_cast<Copy*>(context);
                                   std::memcpy(c.destination, c.source,
                                               static_cast<size_t>(c.bytes));
                               },
                               &next});
    }

    void signal(std::atomic<uint64_t>& counter) override {
        Target& next = targets_[next_target_++ % kDepth];
        next = {&counter, &executor_};
        executor_.post(lane_, {[](void* context, uint64_t) {
                                   const Target& target = *static_cast<Target*>(context);
                                   target.counter->fetch_add(1, std::memory_order_release);
                                   target.executor->wake();
                               },
                               &next, 0, 1});
    }

private:
    static constexpr size_t kDepth = 1024;
    struct Copy {
        void* destination = nullptr;
        const void* source = nullptr;
        int64_t bytes = 0;
    };
    struct Target {
        std::atomic<uint64_t>* counter = nullptr;
        Executor* executor = nullptr;
    };
    Executor& executor_;
    LaneId lane_;
    std::vector<Copy> copies_;
    std::array<Target, kDepth> targets_{};
    size_t next_copy_ = 0, next_target_ = 0;
};

class CpuDevice final : public Device {
public:
    explicit CpuDevice(Executor& executor)
        : compute_(executor, "compute"), h2d_(executor, "h2d"), d2h_(executor, "d2h") {
        streams_ = {&compute_, &h2d_, &d2h_};
    }
    ~CpuDevice() override { free_arena(); }

    int64_t overhead_bytes() const override { return 0; }
    int64_t free_bytes() const override { return std::numeric_limits<int64_t>::max(); }

    void reserve(int64_t bytes) override {
        free_arena();
        const int64_t wanted = round_up(std::max<int64_t>(bytes, 1), 4096);
        void* base = ::mmap(nullptr, static_cast<size_t>(wanted), PROT_READ | PROT_WRITE,
                            MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
        if (base == MAP_FAILED) {
            const std::string why = std::strerror(errno), limit = limit_behind(ENOMEM);
            throw Error(
                Trouble::does_not_fit,
                {.what = "the CPU device's memory cannot be allocated: " + why,
                 .measured = format_bytes(wanted),
                 .limit = limit,
                 .remedy = limit.empty() ? "lower budgets.device, or free memory on this machine"
                                         : "raise that limit, or lower budgets.device"});
        }
        base_ = base;
        bytes_ = wanted;
    }

    DeviceKind kind() const noexcept override { return DeviceKind::cpu; }
    std::string architecture() const override { return "cpu"; }
    std::span<std::byte> memory() noexcept override {
        return {static_cast<std::byte*>(base_), static_cast<size_t>(bytes_)};
    }
    void lock_pages(std::span<std::byte>) override {}
    void unlock_pages(std::span<std::byte>) noexcept override {}
    void check() override {}

private:
    void free_arena() noexcept {
        if (base_ != nullptr) ::munmap(base_, static_cast<size_t>(bytes_));
        base_ = nullptr;
        bytes_ = 0;
    }

    int64_t bytes_ = 0;
    void* base_ = nullptr;
    CpuStream compute_, h2d_, d2h_;
};

}  // namespace

std::unique_ptr<Device> open_cpu_device(Executor& executor) {
    return std::make_unique<CpuDevice>(executor);
}

}  // namespace ferry
