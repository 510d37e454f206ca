// Which bytes live on which tier, and how many buffers they pass through: the planner's policy.
#pragma once

#include <vector>

#include "budget.h"
#include "buffer_sizes.h"
#include "ferry/planner.h"

namespace ferry::planner {

struct Placement {
    int64_t groups = 1;
    std::array<int64_t, kClasses> counts{};
    std::vector<bool> resident{};  // a layer's weights, on the device
    struct ChunkHomes {
        swap::Tier weight = swap::Tier::nvme, state = swap::Tier::nvme;
        swap::Tier gradient = swap::Tier::nvme, park = swap::Tier::nvme;
        bool bets = false;
    };
    std::vector<ChunkHomes> chunks{};
    std::vector<swap::Tier> inputs{};  // [block * group size + i]
    Budget device, host;
};

// Throws does_not_fit naming the tier, the bytes missing and the smallest budget that works.
Placement place(const Config& config, const Workload& work, const std::vector<Chunk>& chunks);

}  // namespace ferry::planner
