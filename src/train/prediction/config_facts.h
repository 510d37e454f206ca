// What a configuration says of its model, its tokens and this machine before anything is planned.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "cost/rank_layout.h"
#include "ferry/config.h"
#include "ops/block_lists.h"

namespace ferry::train {

// Refuses tokens that a run would refuse. It reads only the header of their file, so that planning
// reads no tokens. False: there is no such file yet.
bool check_token_header(const Config& config);
// The part of the causal mask that a pattern of attention leaves.
struct PatternShare {
    std::string name{};
    int64_t block = 0;                // tokens
    int64_t layers = 0, layouts = 0;  // that have it; of a layer, by which its heads differ
    double pairs = 1;                 // the part of the causal mask's pairs that those layers see
    double blocks = 1;                // the same of blocks
    std::shared_ptr<const ops::BlockLists> lists{};  // the first of these layers'
};
std::optional<PatternShare> pattern_share(const Config& config);
// What cost::best_layouts() asks of the model and a step's batch.
cost::ModelSizes model_sizes(const Config& config);
// Refuses reserved cores that a run on this machine would refuse.
void check_reserved_cores(const Config& config);

}  // namespace ferry::train
