// Where the arrays of a chunk's state lie in its bytes, and what an update of them moves.
#pragma once

#include <cstddef>
#include <cstdint>

#include "ferry/optim.h"
#include "planner/planner.h"

namespace ferry::train {

// The arrays of a chunk's state at `in` and `out`, as far as the optimizer keeps them, in a span
// without gradient, weights and the chunk's place in the model.
optim::Span state_span(const StateFormat& format, int64_t count, const std::byte* in,
                       std::byte* out);

// Bytes of memory that an update of `count` elements reads and writes, in the format that the run
// asks for.
int64_t update_bytes_as_asked(const planner::Plan& plan, int64_t count);

}  // namespace ferry::train
