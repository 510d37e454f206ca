// Random numbers as pure functions of a key and a counter.
#pragma once

#include <array>
#include <cstdint>

namespace ferry {

// Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011).
// numerics.md: key = (seed, purpose), counter = (step, global sequence, site, element).
enum class Purpose : uint32_t {
    initialise = 1,
    shuffle = 2,
    stochastic_rounding = 3,
    test = 4,
    pattern = 5  // blocks of attention
};
struct PhiloxKey {
    uint32_t seed;
    Purpose purpose;
};
std::array<uint32_t, 4> philox(PhiloxKey key, std::array<uint32_t, 4> counter) noexcept;
// The normal deviate of one counter: Box-Muller in double, rounded once to float.
float philox_normal(PhiloxKey key, std::array<uint32_t, 4> counter) noexcept;

}  // namespace ferry
