// Where kernels run: a device has a memory arena under a budget, and ordered streams. The CPU
// device is a real one: its "device memory" is an arena of its own, and its streams are executor
// lanes.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>

#include "ferry/device_kind.h"
#include "ferry/error.h"
#include "ferry/executor.h"

namespace ferry {

DeviceKind device_from(std::string_view name);  // "cpu", "cuda"; anything else is a bug
enum class StreamKind : uint8_t { compute, h2d, d2h };
constexpr int kStreams = 3;

// Work in order. Every call enqueues and returns; nothing here blocks or allocates. On CUDA a call
// that the runtime refuses throws Trouble::internal.
class Stream {
public:
    virtual ~Stream() = default;
    // Kernels are called inside a job. On the CPU device it runs on the stream's thread when its
    // turn comes. On CUDA it runs at once, and its kernels are enqueued.
    virtual void launch(Job job) = 0;
    // Enqueues a kernel that does nothing for so long, or a little longer. It is called inside a
    // job, as kernels are. What follows on this stream waits for its end. Other streams, the caller
    // and the device's memory are left alone. In virtual time the job's own duration stands for it.
    virtual void pause(Nanos duration) = 0;
    // Either side may be device or page-locked host memory.
    virtual void copy(void* destination, const void* source, int64_t bytes) = 0;
    // After everything enqueued so far: increments `counter`, then calls the executor's wake(). It
    // does so even when that work failed: Device::check() then throws.
    virtual void signal(std::atomic<uint64_t>& counter) = 0;
    // The cudaStream_t; null on the CPU device.
    virtual void* native() noexcept { return nullptr; }
};

class Device {
public:
    // Opens the device and its streams, without an arena. On CUDA it is the `gpu`-th of the visible
    // ones. Where that is not the first, this process sees no other from then on, and nothing may
    // have used CUDA before. Throws Trouble::usage where this build, this machine or its driver has
    // no such device.
    static std::unique_ptr<Device> open(DeviceKind kind, Executor& executor, int gpu = 0);
    virtual ~Device() = default;
    virtual DeviceKind kind() const noexcept = 0;
    // The hardware that results depend on: "cpu", "cuda sm_90".
    virtual std::string architecture() const = 0;
    // A GPU's "0000:17:00.0", else empty.
    virtual std::string pci_address() const { return {}; }
    Stream& stream(StreamKind kind) noexcept { return *streams_[static_cast<size_t>(kind)]; }

    // The device memory that this process holds beside its arena, as measured now: context, loaded
    // kernels, libraries, page tables of locked host memory. It counts from the process's first
    // device on. 0 on the CPU device.
    virtual int64_t overhead_bytes() const = 0;
    virtual int64_t free_bytes()
        const = 0;  // that reserve() could give now; the CPU device knows no limit
    // Makes the arena, with every byte zero. A second call frees it and makes another one. Throws
    // does_not_fit.
    virtual void reserve(int64_t bytes) = 0;
    // The arena. The planner assigns offsets in it, and nothing allocates from it while running.
    virtual std::span<std::byte> memory() noexcept = 0;

    // Page-locks touched host memory, so that copies run beside the host's threads; unlock before
    // it is unmapped. Any thread; ranges do not overlap. Throws does_not_fit. The CPU device needs
    // none and does nothing.
    virtual void lock_pages(std::span<std::byte> host) = 0;
    virtual void unlock_pages(std::span<std::byte> host) noexcept = 0;

    // Throws the first failure of work that was already enqueued, which no call could return.
    virtual void check() = 0;

protected:
    std::array<Stream*, kStreams> streams_{};  // by kind; the implementation owns and sets them
};

// Whether enqueued work of the GPU has failed. Whoever calls CUDA or its libraries asks when a call
// has failed: after such work every call returns its failure. The caller then reports nothing, for
// it cannot name the work. Device::check() reports it.
bool gpu_work_failed();
// The error for a call that found no memory.
Error out_of_gpu_memory(const std::string& where);

}  // namespace ferry
