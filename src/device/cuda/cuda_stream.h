// A CUDA stream and the executor lane that waits for its events.
#pragma once

#include <cuda_runtime.h>

#include <array>
#include <mutex>
#include <optional>
#include <vector>

#include "ferry/device.h"

namespace ferry {

// Failures that came after a call had returned: the first one, from any thread.
class Failures {
public:
    void note(cudaError_t status) noexcept;
    void check() const;  // throws it

private:
    std::atomic<bool> any_ = false;
    mutable std::mutex mutex_;
    std::optional<Error> first_;
};

// Host memory that was page-locked, region by region. A copy must not cross from one to the next.
class LockedPages {
public:
    void add(std::span<std::byte> pages);
    void remove(std::span<std::byte> pages);
    // Bytes from `at` to the end of its region; a large number outside of all.
    int64_t run_of(const void* at) const;

private:
    mutable std::mutex mutex_;
    std::vector<std::span<std::byte>> regions_;  // by address
};

class CudaStream final : public Stream {
public:
    CudaStream(Executor& executor, std::string name, const LockedPages& pages, Failures& failures);
    ~CudaStream() override;

    void launch(Job job) override { job.run(job.context, job.argument); }
    void pause(Nanos duration) override;
    void copy(void* destination, const void* source, int64_t bytes) override;
    void signal(std::atomic<uint64_t>& counter) override;
    void* native() noexcept override { return stream_; }

private:
    // At most kDepth signals are on their way, so that the event reused next is done with.
    static constexpr size_t kDepth = 256;
    struct Signal {
        cudaEvent_t event = nullptr;
        std::atomic<uint64_t>* counter = nullptr;
        Executor* executor = nullptr;
        Failures* failures = nullptr;
    };
    static void deliver(const Signal& signal) noexcept;
    void enqueued(cudaError_t status, const char* call);

    Executor& executor_;
    LaneId lane_;
    const LockedPages& pages_;
    Failures& failures_;
    cudaStream_t stream_ = nullptr;
    std::array<Signal, kDepth> signals_{};
    size_t next_ = 0;
};

}  // namespace ferry
