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
        swap::Tier gradient = swap::Tier::nvme;
        bool bets = false;
    };
    std::vector<ChunkHomes> chunks{};
    std::vector<swap::Tier> parks{};
    std::vector<swap::Tier> inputs{};  // [block * group size + i]
    Budget device, host;
};

// Rough figures of a small machine, and of a server with a GPU, to weigh costs with until a
// machine's own are known. They decide how much is worth betting on; they never change a number.
struct MachineFigures {
    double flops_per_s = 1.5e11, nvme_bytes_per_s = 1.5e9, dram_bytes_per_s = 2e10;
};
constexpr MachineFigures kGpuServer{
    .flops_per_s = 4e14, .nvme_bytes_per_s = 4e9, .dram_bytes_per_s = 1.5e11};

// The part of the optimizer's work that the next forward pass cannot hide and backward can
// (design: state x min(b, o - f) / o): what is worth updating before the clip factor is known.
double bet_fraction(double forward_s, double backward_s, double optimizer_s);

// Throws does_not_fit naming the tier, the bytes missing and the smallest budget that works.
Placement place(const Config& config, const Workload& work, const std::vector<Chunk>& chunks,
                const std::vector<Park>& parks);

}  // namespace ferry::planner
