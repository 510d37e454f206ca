// Memory that transfers go through: aligned, on huge pages where there are any.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace ferry::checkpoint {

inline constexpr int64_t kBlock = 4096;  // transfers around the page cache are of such blocks

class IoMemory {
public:
    // Throws does_not_fit.
    explicit IoMemory(int64_t bytes);
    ~IoMemory();
    IoMemory(const IoMemory&) = delete;
    IoMemory& operator=(const IoMemory&) = delete;

    std::span<std::byte> bytes() const { return memory_; }

private:
    void* mapped_ = nullptr;
    size_t mapped_bytes_ = 0;
    std::span<std::byte> memory_{};
};

}  // namespace ferry::checkpoint
