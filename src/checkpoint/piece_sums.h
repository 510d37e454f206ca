// The checksums of an array, one for each piece of it: any piece is proved alone, by any thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "base/checksum.h"
#include "ferry/units.h"

namespace ferry::checkpoint {

inline constexpr int64_t kSummedBytes = 2 * kMiB;  // the last piece may be shorter

// Of bytes that come one after the other.
class PieceSums {
public:
    void add(std::span<const std::byte> bytes);
    // After all of them; then those of the next array may come.
    std::vector<uint64_t> finish();

private:
    void end_piece();

    std::optional<RunningChecksum> piece_{};  // that is not whole yet
    int64_t held_ = 0;                        // bytes of it
    std::vector<uint64_t> sums_{};
};

// The checksum of an array: of its pieces' checksums.
uint64_t sum_of(std::span<const uint64_t> pieces);

}  // namespace ferry::checkpoint
