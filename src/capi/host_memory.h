// Host memory, with the threads that touch it and the device that it is locked for.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "ferry/device.h"
#include "ferry/executor.h"
#include "ferry/ferry.h"
#include "ferry/pinned_mem.h"
#include "ferry/team.h"

namespace ferry::capi {

struct HostMemoryOptions {
    int threads = 1;
    DeviceKind lock_for = DeviceKind::cpu;
    int gpu = 0;
    pinned_mem::Allocator allocator{};
};
// The options for what a caller passes in; 0 threads: one a core.
HostMemoryOptions host_memory_options(int32_t threads, int32_t lock_for, int32_t gpu,
                                      const ferry_allocator* allocator);

class HostMemory {
public:
    HostMemory(int64_t budget_bytes, const HostMemoryOptions& options);
    ~HostMemory();
    HostMemory(const HostMemory&) = delete;
    HostMemory& operator=(const HostMemory&) = delete;

    // Touched, and locked; empty for 0 bytes.
    std::span<std::byte> reserve(const std::string& name, int64_t bytes);
    int64_t reserved_bytes() const;
    NodeTeams& teams() { return *teams_; }
    Executor& executor() { return *executor_; }

private:
    const std::shared_ptr<const Topology> machine_;
    const std::unique_ptr<Executor> executor_;
    const std::unique_ptr<Device> device_;
    const std::unique_ptr<NodeTeams> teams_;
    const std::unique_ptr<pinned_mem::Pool> pool_;
};

}  // namespace ferry::capi
