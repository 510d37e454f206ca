// Whose durable state a path holds, for who must know before a volume is opened.
#pragma once

#include <cstdint>

#include "ferry/aio.h"

namespace ferry::aio {

// The run_id that the state was published with; 0: there is none, or its header is not whole. Locks
// and changes nothing.
uint64_t published_run(const PathOptions& path) noexcept;

}  // namespace ferry::aio
