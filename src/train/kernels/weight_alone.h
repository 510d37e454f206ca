// The weights of a rank between two exchanges of momentum. Only they move: masters, moments and
// all other state stay as the last exchange left them, alike on all ranks.
#pragma once

#include <cstdint>

#include "ferry/optim.h"
#include "planner/planner.h"
#include "step_state.h"

namespace ferry::train {

inline UpdateKind kind_of(const planner::Chunk& chunk) {
    return is_matrix(chunk) ? UpdateKind::matrix
           : chunk.decays   ? UpdateKind::decayed
                            : UpdateKind::plain;
}

// Writes the weights of elements [first, first + count) of a span, at most a leaf. They are what
// AdamW's update would make of the span's state and gradient; the state is not written. Any thread.
void update_weight_alone(const optim::Span& span, int64_t first, int64_t count,
                         const optim::Scalars& scalars);

}  // namespace ferry::train
