// Requests of a thread to the system: a nap, and its cores.
#pragma once

#include <span>

#include "ferry/executor.h"

namespace ferry {

// Sleeps between two looks at something that takes its time: an eighth of what was waited so far,
// 2 to 50 us. Short work is seen at once, long work costs little.
void nap_after(Nanos waited) noexcept;
// Binds the calling thread to these cores. False where it may not run on any of them, with errno.
bool run_on(std::span<const int> cores) noexcept;

}  // namespace ferry
