// The order in which an epoch visits its sequences.
#pragma once

#include <cstdint>

namespace ferry {

// Where sequence number `index` of an epoch lies among the `count`: a permutation of 0 .. count-1
// that is a pure function of (seed, epoch, count), so a run restarts at any step without a table.
uint64_t shuffled(uint32_t seed, uint64_t epoch, uint64_t count, uint64_t index);

}  // namespace ferry
