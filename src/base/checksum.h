// The checksum of bytes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace ferry {

// XXH3 64-bit of the bytes: the checksum of storage pieces and of the run's final hash.
uint64_t checksum(std::span<const std::byte> bytes) noexcept;

}  // namespace ferry
