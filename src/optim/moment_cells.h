// Which code a share has, as a table of integers, for targets that gather from memory. Filled at
// start-up from the maps.
#pragma once

#include <cstdint>

#include "ferry/optim.h"

namespace ferry::optim {

// A cell holds the x (moment_map.h) that differ in their last bits only, so few that at most one
// code begins in it. Its word has the distance from zero's code of its smallest x above kAtBits,
// and below that from which last bits on the next distance holds.
template <bool kSigned>
struct MomentCells {
    static constexpr int kLastBits = kSigned ? 17 : 16;
    static constexpr int32_t kLeast = 0x34000000, kMost = 0x3f800004;  // 2^-23 and a little above 1
    static constexpr int32_t kCount = ((kMost - kLeast) >> kLastBits) + 1;
    static constexpr int kAtBits = 18;
    int32_t word[kCount];
    MomentCells();
};

const MomentCells<true>& cells_with_sign();
const MomentCells<false>& cells_without_sign();

}  // namespace ferry::optim
