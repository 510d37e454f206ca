// A compute stream that one thread alone gives work to, and waits for: what measures operations.
#pragma once

#include <functional>

#include "ferry/device.h"
#include "ferry/executor.h"
#include "ops/timed_ops.h"

namespace ferry::ops {

class TimedStream {
public:
    // Both must outlive it.
    TimedStream(Device& device, Executor& executor) : device_(device), executor_(executor) {}

    // Until all that was given is done. Throws what went wrong.
    void wait();
    // Work that enqueues, waited for. Seconds that the host took for it, where the device does the
    // rest.
    double launch(const std::function<void()>& work);
    // The same, each call of `timed` noted. The GPU waits until the host has enqueued all of it,
    // which takes about `enqueued_s`: so no call is timed with the wait for its launch.
    void time_calls(TimedOps& timed, const std::function<void()>& work, double enqueued_s);

private:
    Stream& stream() { return device_.stream(StreamKind::compute); }

    Device& device_;
    Executor& executor_;
};

}  // namespace ferry::ops
