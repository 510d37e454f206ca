// Whether memory has the huge pages that were asked for.
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

// The setting of process or machine that keeps memory from huge pages, or that it is fragmented.
std::string why_not_huge();

}  // namespace ferry::pinned_mem
