// The processors' time of this process.
#pragma once

#include <ctime>

namespace ferry {

// Of all its threads, io_uring's workers too, since it began.
inline double process_cpu_seconds() {
    timespec time{};
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &time);
    return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
}

}  // namespace ferry
