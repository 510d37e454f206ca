// Beside a thread whose library may not return to it: no deadline that this thread keeps itself
// would end that.
#pragma once

#include <atomic>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <optional>
#include <stop_token>
#include <thread>

#include "ferry/error.h"
#include "ferry/executor.h"

namespace ferry::comm {

class Watchdog {
public:
    // Asked now and then, on a thread of the watchdog's, while the watched one stays in a call;
    // `stuck`: for how long. Time in which this process was stopped, or the machine suspended, does
    // not count. What it answers ends the process, by its exit code and with its text on standard
    // error; or is told to what on_stuck() was given, and this call is not asked about again.
    using Judge = std::function<std::optional<Error>(Nanos stuck)>;
    explicit Watchdog(Judge judge);

    // The watched thread calls these around each call.
    void enter() noexcept { cross(); }
    void leave() noexcept { cross(); }

private:
    void cross() noexcept {
        crossings_.store(crossings_.load(std::memory_order_relaxed) + 1, std::memory_order_relaxed);
    }
    void watch(const std::stop_token& over);

    const Judge judge_;
    std::atomic<uint64_t> crossings_ = 0;  // odd: in a call
    std::mutex mutex_;
    std::condition_variable_any changed_;
    std::jthread thread_;
};

}  // namespace ferry::comm
