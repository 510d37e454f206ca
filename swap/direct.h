// Access to objects outside of any schedule: it blocks.
#pragma once

#include <atomic>
#include <deque>
#include <span>

#include "object_table.h"

namespace ferry::swap {

// Used while no schedule is under way. Checks nothing that it reads.
class Direct {
public:
    Direct(ObjectTable& table, Executor& executor, Device& device, aio::Volume* volume)
        : table_(table), executor_(executor), device_(device), volume_(volume) {}
    Direct(const Direct&) = delete;
    Direct& operator=(const Direct&) = delete;
    ~Direct() { wait_for_puts(); }

    // As Store has them.
    void begin_put(ObjectId object, std::span<std::byte> bytes);
    void end_puts();
    void get(ObjectId object, std::span<std::byte> bytes);
    std::span<std::byte> in_host(ObjectId object) noexcept;

private:
    struct Put {
        ObjectId object = kNoObject;
        aio::Operation operation{};
    };
    void wait_for_puts();
    void copy(StreamKind kind, std::byte* destination, const std::byte* source, ObjectId object);
    void wait_for_copies();

    ObjectTable& table_;
    Executor& executor_;
    Device& device_;
    aio::Volume* volume_;
    std::deque<Put> puts_{};  // to NVMe, begun; they stay where they are
    size_t polled_ = 0;       // of them
    std::atomic<uint64_t> copied_ = 0;
    uint64_t copies_ = 0;  // begun
};

}  // namespace ferry::swap
