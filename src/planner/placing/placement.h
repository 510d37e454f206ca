// Which bytes live on which tier, and how many buffers they pass through.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "planner/budget.h"
#include "planner/buffer_sizes.h"
#include "planner/planner.h"

namespace ferry::planner {

struct Placement {
    int64_t groups = 1;
    std::array<int64_t, kClasses> counts{};
    std::vector<bool> resident{};               // a layer's weights, on the device
    model::OfSaved<std::vector<bool>> saved{};  // by layer: saved on the device until backward
    struct ChunkHomes {
        swap::Tier weight = swap::Tier::nvme, state = swap::Tier::nvme;
        swap::Tier gradient = swap::Tier::nvme;
        swap::Tier kept = swap::Tier::nvme, feedback = swap::Tier::nvme;  // where it has them
        bool speculative = false;
    };
    std::vector<ChunkHomes> chunks{};
    bool matrices_on_device = false;  // some have their state there
    std::vector<swap::Tier> spills{};
    std::vector<swap::Tier> inputs{};                      // [block * group size + i]
    std::vector<std::vector<swap::Tier>> second_shards{};  // [layer, segment]; empty: it has none
    Budget device, host;
};

// An activation that a layer may save from forward to backward.
struct SavedActivation {
    size_t layer = 0;
    model::Saved what{};
};
}  // namespace ferry::planner
