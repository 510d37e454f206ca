// Host memory for checkpoints on their way.
#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include "ferry/config.h"
#include "model/model.h"
#include "train/setup/rank_share.h"
#include "train/stack/tier_stack.h"

namespace ferry::train {

// Reserves what waits to be written, beside the stack's plan; the first checkpoint touches it.
// `own`: each rank reads its part alone. Empty where nothing is saved on the way or there is no
// memory. Throws does_not_fit where the configuration asks for more than there is. `layers`: the
// whole model's.
std::span<std::byte> reserve_checkpoint_room(const Config& config, const World& world,
                                             const BudgetConfig& budgets,
                                             const std::vector<model::Layer>& layers, bool own,
                                             TierStack& stack);

}  // namespace ferry::train
