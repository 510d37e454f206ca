#include <sched.h>

#include "base/threads.h"

namespace ferry {

bool run_on(std::span<const int> cores) noexcept {
    cpu_set_t set;
    CPU_ZERO(&set);
    for (const int core : cores) CPU_SET(static_cast<size_t>(core), &set);
    return sched_setaffinity(0, sizeof set, &set) == 0;
}

}  // namespace ferry
