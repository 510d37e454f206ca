// Which bytes live on which tier, and how many buffers they pass through: the planner's policy.
#pragma once

#include <span>
#include <vector>

#include "budget.h"
#include "buffer_sizes.h"
#include "planner/planner.h"

namespace ferry::planner {

struct Placement {
    int64_t groups = 1;
    std::array<int64_t, kClasses> counts{};
    std::vector<bool> resident{};              // a layer's weights, on the device
    model::OfSaved<std::vector<bool>> kept{};  // of a layer, on the device until backward
    struct ChunkHomes {
        swap::Tier weight = swap::Tier::nvme, state = swap::Tier::nvme;
        swap::Tier gradient = swap::Tier::nvme;
        bool speculative = false;
    };
    std::vector<ChunkHomes> chunks{};
    std::vector<swap::Tier> spills{};
    std::vector<swap::Tier> inputs{};  // [block * group size + i]
    Budget device, host;
};

// The part of the optimizer's work that is worth doing before the clip factor is known. It is none
// where a quarter of the next forward pass hides all of it. Else backward and forward are left the
// same share of slack, as any late update makes its layer's forward wait. It is never more than
// backward hides. `out_of_place`: seconds of a speculative update, of one after the outcome.
double speculative_fraction(double forward_s, double backward_s, double optimizer_s,
                            double out_of_place);

// What a layer may keep from forward to backward.
struct KeptResult {
    size_t layer = 0;
    model::Saved what{};
};
// How many blocks the configuration has save that; less than 0: the planner decides.
int64_t blocks_asked_to_keep(const Config& config, model::Saved what);

// What stays on the device from forward to backward. First the inputs of at most so many blocks,
// the last ones, as far as they fit. Then these results in their order: all that the configuration
// asks for, and as many of the others as fit.
struct Keeping {
    int64_t inputs = 0;
    std::span<const KeptResult> results{};
};
// Throws does_not_fit naming the tier, the bytes missing and the smallest budget that works.
Placement place(const Config& config, const Workload& work, const std::vector<Chunk>& chunks,
                const std::vector<AccumulatorSpill>& spills, const MachineFigures& machine,
                const Keeping& keeping);
// Keeps as much as is asked for, or as makes the step shortest, in as many groups.
Placement place_for_speed(const Config& config, const Workload& work,
                          const std::vector<Chunk>& chunks,
                          const std::vector<AccumulatorSpill>& spills,
                          const MachineFigures& machine);

}  // namespace ferry::planner
