// The order in which a stage of a pipeline takes groups of micro-batches through its virtual
// stages.
//
// - 1F1B: as many groups go forward first as there are stages from here on, then one goes back for
//   each that goes forward. Where backward is split, weights' gradients come some groups later.
// - Interleaved (Narayanan et al. 2021, arXiv 2104.04473): sets of about as many groups as there
//   are stages go through one virtual stage after the other. Within these sets it is one back for
//   one forward. Sets differ by one group at most. None has fewer groups than there are stages,
//   unless there are no more.
// - Round robin (breadth first; Lamy-Poirier 2022, arXiv 2211.05953): all groups go through one
//   virtual stage before the next one.
#pragma once

#include <cstdint>
#include <vector>

#include "zero/zero.h"

namespace ferry::zero {

// What a stage does next with a group of micro-batches in a virtual stage.
struct Action {
    enum class What : uint8_t { take_inputs, forward, take_gradients, backward, weight_gradients };
    What what{};
    int64_t virtual_stage = 0, group = 0;
    bool operator==(const Action&) const = default;
};

// The actions of a stage, in its order: each group of micro-batches goes forward and back through
// each virtual stage. A stage asks for what others send one action early. Any two stages make their
// passes in the same order. So no stage would be stuck even if both ends of a pass had to make it
// at the same time (decision 51).
std::vector<Action> actions_of(const Stage& stage, int64_t groups);
// The most groups whose block inputs or gradients a stage holds at once.
int64_t held_at_once(const Stage& stage, int64_t groups);

}  // namespace ferry::zero
