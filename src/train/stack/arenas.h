// The memory that a run reserves at start-up, and what it holds of each tier.
#pragma once

#include <future>
#include <span>
#include <string>

#include "ferry/config.h"
#include "ferry/device.h"
#include "ferry/pinned_mem.h"
#include "ferry/train.h"
#include "planner/planner.h"
#include "start_up.h"

namespace ferry::train {

// Reserves the arenas of the plan. Returns the host's, with its buffers page-locked where the
// device needs it. `name`: how errors call its slab.
std::span<std::byte> reserve_arenas(const planner::Plan& plan, Device& device, NodeTeams& teams,
                                    pinned_mem::Pool& pool, StartUp& start_up,
                                    const std::string& name);

// Page-locks the rest of it, while the state gets its first contents; get() before the first step.
std::future<void> lock_homes(const planner::Plan& plan, Device& device, pinned_mem::Pool& pool,
                             std::span<std::byte> arena);

// To be called when everything that takes device memory has taken it. Throws does_not_fit where
// that is more than the budget.
void check_device_memory(Device& device, const planner::Plan& plan, int64_t budget);

// The bytes that a run holds of each tier; `volume` may be null.
Reserved reserved_by(Device& device, const pinned_mem::Pool& pool, const aio::Volume* volume);

}  // namespace ferry::train
