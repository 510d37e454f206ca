// Compiled with -mavx2 where the compiler has it, so nothing else belongs here. The linker could
// take an inline function of another header from this file for the whole program.
#include "xxh3.h"

#define XXH_PREFETCH_DIST FERRY_XXH3_AHEAD_BYTES
#define XXH_INLINE_ALL
#include <xxhash.h>

namespace ferry::aio {

bool has_avx2() noexcept {
#ifdef __AVX2__
    return __builtin_cpu_supports("avx2") != 0;
#else
    return false;
#endif
}

uint64_t xxh3_avx2(const void* data, size_t bytes, uint64_t seed) noexcept {
    return XXH3_64bits_withSeed(data, bytes, seed);
}

}  // namespace ferry::aio
