// Access to objects outside of any schedule: it blocks.
#pragma once

#include <atomic>
#include <deque>
#include <span>

#include "ferry/device.h"
#include "object_table.h"

namespace ferry::swap {

// Used while no schedule is under way. Checks nothing that it reads.
class Direct {
public:
    Direct(ObjectTable& table, Executor& executor, Device& device, aio::Volume* volume)
        : table_(table), executor_(executor), device_(device), volume_(volume) {}
    Direct(const Direct&) = delete;
    Direct& operator=(const Direct&) = delete;
    ~Direct();

    // As Store has them.
    void begin_put(ObjectId object, std::span<std::byte> bytes);
    void end_puts(int64_t under_way);
    void get(ObjectId object, std::span<std::byte> bytes);
    std::span<std::byte> in_host(ObjectId object) noexcept;

private:
    struct Put : aio::Operation {
        ObjectId object = kNoObject;
        uint64_t copy = 0;  // which of the copies it is; 0: a write
        bool polled = false;
    };
    bool finished(const Put& put) const noexcept;
    void wait_for(const Put& put);
    void copy(StreamKind kind, std::byte* destination, const std::byte* source, ObjectId object);
    void wait_for_copies();

    ObjectTable& table_;
    Executor& executor_;
    Device& device_;
    aio::Volume* volume_;
    std::deque<Put> puts_{};  // begun, the oldest first; they stay where they are
    std::atomic<uint64_t> copied_ = 0;
    uint64_t copies_ = 0;  // begun
};

}  // namespace ferry::swap
