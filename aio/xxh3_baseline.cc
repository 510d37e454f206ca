#include "xxh3.h"

#define XXH_PREFETCH_DIST FERRY_XXH3_AHEAD_BYTES
#define XXH_INLINE_ALL
#include <xxhash.h>

namespace ferry::aio {

uint64_t xxh3_baseline(const void* data, size_t bytes, uint64_t seed) noexcept {
    return XXH3_64bits_withSeed(data, bytes, seed);
}

Xxh3 best_xxh3() noexcept { return has_avx2() ? xxh3_avx2 : xxh3_baseline; }

}  // namespace ferry::aio
