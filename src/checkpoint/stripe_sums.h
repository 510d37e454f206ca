// The checksums of an array, one for each stripe of it: any stripe is proved alone, by any thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "base/checksum.h"
#include "ferry/units.h"

namespace ferry::checkpoint {

inline constexpr int64_t kStripeBytes = 2 * kMiB;  // the last stripe may be shorter

// Of bytes that come one after the other.
class StripeSums {
public:
    void add(std::span<const std::byte> bytes);
    // After all of them; then those of the next array may come.
    std::vector<uint64_t> finish();

private:
    void end_stripe();

    std::optional<RunningChecksum> stripe_{};  // that is not whole yet
    int64_t held_ = 0;                         // bytes of it
    std::vector<uint64_t> sums_{};
};

// The checksum of an array: of its stripes' checksums.
uint64_t sum_of(std::span<const uint64_t> stripes);

}  // namespace ferry::checkpoint
