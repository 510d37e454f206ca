// Where the arrays of a chunk's state lie in its bytes, and what an update of them moves.
#pragma once

#include <cstddef>
#include <cstdint>

#include "ferry/optim.h"
#include "planner/planner.h"

namespace ferry::train {

// A span with the arrays of a chunk's state that the optimizer keeps, read at `in` and written at
// `out`. Gradient, weights and the chunk's place in the model are the caller's to fill in.
optim::Span state_span(const StateFormat& format, int64_t count, const std::byte* in,
                       std::byte* out);

// Bytes of memory that an update of `count` elements reads and writes, in the format that the run
// asks for.
int64_t update_bytes_as_asked(const planner::Plan& plan, int64_t count);

}  // namespace ferry::train
