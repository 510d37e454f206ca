// How the SIMD loops find a share's code: by the leading bits of the float, and one comparison.
#pragma once

#include <cstdint>

#include "ferry/optim.h"

namespace ferry::optim {

// A cell holds the shares of one sign that differ in their last bits only, so few that at most one
// code begins in it. Its word has the code of its smallest magnitude above kAtBits, and below that
// from which last bits on the next code holds. Smaller magnitudes than kLeast are all code zero.
template <bool kSigned>
struct MomentCells {
    static constexpr int kLastBits = kSigned ? 17 : 16;
    static constexpr int32_t kLeast = 0x34000000, kOne = 0x3f800000;  // 2^-23 and 1
    static constexpr int32_t kOfSign = ((kOne - kLeast) >> kLastBits) + 1;
    static constexpr int kAtBits = 18;
    int32_t word[(kSigned ? 2 : 1) * kOfSign];
    MomentCells();
};

const MomentCells<true>& cells_with_sign();
const MomentCells<false>& cells_without_sign();

}  // namespace ferry::optim
