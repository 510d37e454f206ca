#include "sequence_order.h"

#include <bit>

#include "base/random.h"
#include "ferry/error.h"

namespace ferry {
namespace {

// A balanced Feistel network permutes 2^(2 * half_bits) values whatever its round function is.
uint64_t feistel(PhiloxKey key, uint64_t epoch, int half_bits, uint64_t value) {
    constexpr uint32_t kRounds = 6;
    const uint64_t low_mask = (uint64_t{1} << half_bits) - 1;
    uint64_t left = value >> half_bits, right = value & low_mask;
    for (uint32_t round = 0; round < kRounds; ++round) {
        const auto noise =
            philox(key, {static_cast<uint32_t>(epoch), static_cast<uint32_t>(epoch >> 32), round,
                         static_cast<uint32_t>(right)});
        const uint64_t mixed = left ^ (noise[0] & low_mask);
        left = right;
        right = mixed;
    }
    return (left << half_bits) | right;
}

}  // namespace

uint64_t shuffled(uint32_t seed, uint64_t epoch, uint64_t count, uint64_t index) {
    FERRY_CHECK(index < count && count <= uint64_t{1} << 62);
    const int half_bits = (std::bit_width(count - 1) + 1) / 2;
    if (half_bits == 0) return 0;  // one sequence
    // Walks the cycle until it is back among the `count` first: fewer than four turns on average.
    uint64_t value = index;
    do {
        value = feistel({seed, Purpose::shuffle}, epoch, half_bits, value);
    } while (value >= count);
    return value;
}

}  // namespace ferry
