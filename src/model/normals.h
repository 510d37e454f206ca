// Normal deviates by the vector.
#pragma once

#include <cstdint>
#include <span>

#include "base/random.h"

namespace ferry::model {

// philox_normal() of the counters {element >> 32, site >> 32, site, element} for the elements from
// `first` on: the same bits, several at a time.
void philox_normals(PhiloxKey key, uint64_t site, uint64_t first, std::span<float> out);

}  // namespace ferry::model
