// Host memory for shards and I/O: slabs reserved at start, touched in parallel, page-locked where
// the device needs it, then sealed. The planner assigns offsets; nothing allocates afterwards.
#pragma once

#include <cstdint>
#include <functional>
#include <future>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "ferry/device.h"
#include "ferry/team.h"

namespace ferry {
struct Topology;
}

namespace ferry::pinned_mem {

// One contiguous run of host memory, aligned to 2 MiB.
struct SlabReport {
    std::string name{};
    int64_t bytes = 0;
    int64_t huge_bytes = 0;  // bytes on huge pages, as the kernel said once all were touched
};

// Gives memory of the program's own in place of the system's.
struct Allocator {
    // Gives so many writable bytes at a multiple of `alignment`. Their contents do not matter, and
    // they are not page-locked. Null: there is no memory.
    std::function<void*(int64_t bytes, int64_t alignment)> allocate{};
    std::function<void(void* memory, int64_t bytes)> release{};
    bool given() const { return static_cast<bool>(allocate); }
};

class Pool {
public:
    // Throws does_not_fit when the sum of slabs would exceed `budget_bytes`, or what was left of
    // the machine or cgroup (Topology::memory_left_bytes). It does not know what others reserve
    // beside it: whoever does checks that all of it fits. With an allocator every slab is one call
    // of it.
    Pool(const Topology& topology, int64_t budget_bytes, Allocator allocator = {});
    ~Pool();
    Pool(const Pool&) = delete;
    Pool& operator=(const Pool&) = delete;

    // Before seal() only; a bug afterwards. The memory is zero. The teams' nodes touch 2 MiB each
    // in turn, and what a node touches lies on it. So whatever is worked on keeps every node's
    // memory busy. Warns of a slab that did not get the huge pages it asked for.
    std::span<std::byte> reserve(std::string name, int64_t bytes, NodeTeams& teams) {
        return reserve(std::move(name), bytes, bytes, teams);
    }
    // Touches only the first `now` bytes. lock_behind() touches the rest, or whoever uses it
    // before. On Linux before 5.14 all are touched.
    std::span<std::byte> reserve(std::string name, int64_t bytes, int64_t now, NodeTeams& teams);
    // Touches a part of a slab and what lies around it, so much at a time that every thread of the
    // teams has pages of its own. Contents stay. It is cheap where the part was touched before. It
    // is better than the first writes of many threads, which may each want the same page. One
    // thread calls.
    void touch(std::span<std::byte> part, NodeTeams& teams);
    // Page-locks a slab for the device, which must outlive the pool. Or a part of one, of whole
    // kPartBytes, that begins at its start or ends at its end. Throws does_not_fit.
    void lock_for(Device& device, std::span<std::byte> pages, Team& team);
    // The same by threads of its own, while others use the memory. It is touched first. get() waits
    // for the end, and throws.
    std::future<void> lock_behind(Device& device, std::span<std::byte> pages);
    static constexpr int64_t kPartBytes = int64_t{2} << 20;
    void seal() noexcept { sealed_ = true; }
    int64_t reserved_bytes() const noexcept { return reserved_bytes_; }
    const std::vector<SlabReport>& slabs() const noexcept { return reports_; }

private:
    std::byte* map(const std::string& name, int64_t bytes);
    std::byte* ask_for(const std::string& name, int64_t bytes);
    [[noreturn]] void refuse(const std::string& name, int64_t bytes, const char* where,
                             const std::string& limit, const char* remedy) const;
    size_t slab_of(std::span<std::byte> part) const;
    void look_for_huge_pages(std::span<std::byte> part);
    void lock_part(Device& device, std::span<std::byte> part);

    struct Mapping {
        void* base;
        size_t bytes;
    };
    const Topology& topology_;
    int64_t budget_bytes_;
    const Allocator allocator_;
    int64_t reserved_bytes_ = 0;
    bool sealed_ = false;
    Device* device_ = nullptr;  // the one they are locked for
    std::mutex mutex_;          // guards the list of locked memory
    std::vector<std::span<std::byte>> locked_{};
    std::vector<Mapping> mappings_{};
    struct Slab {
        std::span<std::byte> memory;
        std::vector<bool> touched{};  // by touch(), run by run
    };
    std::vector<Slab> slabs_{};
    std::vector<SlabReport> reports_{};
};

}  // namespace ferry::pinned_mem
