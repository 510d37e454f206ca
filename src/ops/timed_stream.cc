#include "ops/timed_stream.h"

#include <algorithm>
#include <atomic>
#include <chrono>

namespace ferry::ops {

void TimedStream::wait() {
    std::atomic<uint64_t> done = 0;
    stream().signal(done);
    while (done.load(std::memory_order_acquire) == 0) executor_.wait(kForever);
    device_.check();
}

double TimedStream::launch(const std::function<void()>& work) {
    using Clock = std::chrono::steady_clock;
    const auto start = Clock::now();
    stream().launch(
        {[](void* context, uint64_t) { (*static_cast<const std::function<void()>*>(context))(); },
         const_cast<std::function<void()>*>(&work)});
    const double taken = std::chrono::duration<double>(Clock::now() - start).count();
    wait();
    return taken;
}

void TimedStream::time_calls(TimedOps& timed, const std::function<void()>& work,
                             double enqueued_s) {
    launch([&] {
        if (device_.kind() == DeviceKind::cuda) {
            const double longest = 0.25;
            const double pause_s = std::min(longest, 1e-3 + 2 * enqueued_s);
            stream().pause(static_cast<Nanos>(pause_s * 1e9));
        }
        timed.begin(TimedOps::Mode::time);
        work();
    });
}

}  // namespace ferry::ops
