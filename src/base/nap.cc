#include <sys/prctl.h>

#include <algorithm>
#include <ctime>

#include "base/threads.h"
#include "ferry/executor.h"

namespace ferry {

void nap_after(Nanos waited) noexcept {
    thread_local bool precise = false;  // else the kernel may add 50 us to every sleep
    if (!precise) prctl(PR_SET_TIMERSLACK, 1000UL);
    precise = true;
    const timespec rest{.tv_sec = 0,
                        .tv_nsec = static_cast<long>(std::clamp<Nanos>(waited / 8, 2000, 50'000))};
    nanosleep(&rest, nullptr);
}

}  // namespace ferry
