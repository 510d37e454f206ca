// The elements that a thread loads and stores at once.
#pragma once

namespace ferry::ops::cuda {

// Eight consecutive elements of a row, where they lie at multiples of 16 bytes. Which thread has
// which elements depends on the columns alone, so a sum's order does too.
constexpr int kPack = 8;

}  // namespace ferry::ops::cuda
