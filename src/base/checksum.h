// The checksum of bytes, all at once or part by part.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

namespace ferry {

// XXH3 64-bit of the bytes: the checksum of storage's pieces and of the run's final hash.
uint64_t checksum(std::span<const std::byte> bytes) noexcept;

// The same of bytes that come part by part.
class RunningChecksum {
public:
    RunningChecksum();
    ~RunningChecksum();
    void add(std::span<const std::byte> bytes) noexcept;
    uint64_t value() const noexcept;  // of all that was added

private:
    struct State;
    std::unique_ptr<State> state_;
};

}  // namespace ferry
