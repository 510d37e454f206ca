// Where the arrays of a chunk's state lie in its bytes. Also: the bytes that an update moves, and
// the threads that make it.
#pragma once

#include <cstddef>
#include <cstdint>

#include "ferry/optim.h"
#include "ferry/team.h"
#include "planner/planner.h"

namespace ferry::train {

// A span with the arrays of a chunk's state that the optimizer keeps, read at `in` and written at
// `out`. Gradient, weights and the chunk's place in the model are the caller's to fill in.
optim::Span state_span(const StateFormat& format, int64_t count, const std::byte* in,
                       std::byte* out);

// Bytes of memory that an update of `count` elements reads and writes, in the format that the run
// asks for.
int64_t update_bytes_as_asked(const planner::Plan& plan, int64_t count);

// Whether two threads take turns at the team's updates. The teams of several nodes wait for one
// caller at a time; where the run was given one thread, two would be more.
inline bool updates_take_turns(NodeTeams& teams) {
    return teams.count() == 1 && teams.all().threads() > 1;
}

}  // namespace ferry::train
