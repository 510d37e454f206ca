// The weights of a rank between two exchanges of momentum: masters, moments and all other state
// stay as they were at the last one, which is how all ranks have them.
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

// Writes the weights of elements [first, first + count) of a span, at most a leaf: what AdamW's
// update makes of its state by its gradient, which is left as it is. Any thread.
void update_weight_alone(const optim::Span& span, int64_t first, int64_t count,
                         const optim::Scalars& scalars);

}  // namespace ferry::train
