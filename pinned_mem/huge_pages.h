// What the kernel made of a wish for huge pages.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

namespace ferry::pinned_mem {

constexpr int64_t kHugePage = int64_t{2} << 20;

// Bytes of touched memory that lie on huge pages, by /proc/self/smaps; 0 where that cannot be read.
// Only of mappings that begin inside `memory`: a slab is one of its own.
int64_t huge_bytes_of(std::span<const std::byte> memory);

// What this process or machine is set to that keeps it from them, or that memory is fragmented.
std::string why_not_huge();

}  // namespace ferry::pinned_mem
