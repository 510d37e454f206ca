// Where kernels run: a memory arena under a budget and ordered streams. The CPU device is a real
// device: its "device memory" is an arena of its own, its streams are executor lanes.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <span>

#include "ferry/base.h"

namespace ferry {

enum class DeviceKind : uint8_t { cpu, cuda };
enum class StreamKind : uint8_t { compute, h2d, d2h };
constexpr int kStreams = 3;

// Work in order. Every call enqueues and returns; nothing here blocks or allocates.
class Stream {
public:
    virtual ~Stream() = default;
    // Kernels are called inside a job: on the CPU device it runs on the stream's thread when its
    // turn comes, on CUDA it runs at once and its kernels are enqueued.
    virtual void launch(Job job) = 0;
    // Either side may be device or pinned host memory.
    virtual void copy(void* destination, const void* source, int64_t bytes) = 0;
    // After everything enqueued so far: ++counter, then the executor's wake().
    virtual void signal(std::atomic<uint64_t>& counter) = 0;
};

class Device {
public:
    // Reserves `memory_bytes` of device memory and touches it. Throws does_not_fit.
    static std::unique_ptr<Device> open(DeviceKind kind, int64_t memory_bytes, Executor& executor);
    virtual ~Device() = default;
    virtual DeviceKind kind() const noexcept = 0;
    virtual Stream& stream(StreamKind kind) noexcept = 0;
    // The arena: the planner assigns offsets in it, nothing allocates from it while running.
    virtual std::span<std::byte> memory() noexcept = 0;
};

}  // namespace ferry
