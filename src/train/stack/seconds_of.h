// Times work, on this thread or on a device's stream.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>

#include "ferry/device.h"
#include "ferry/executor.h"

namespace ferry::train {

template <class Work>
double seconds_of(const Work& work) {
    const auto start = std::chrono::steady_clock::now();
    work();
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

// Runs work(i) `times` times on a stream and waits for the last; seconds of each.
template <class Work>
double seconds_on(Stream& stream, Executor& executor, int64_t times, const Work& work) {
    std::atomic<uint64_t> done = 0;
    const double seconds = seconds_of([&] {
        for (int64_t i = 0; i < times; ++i) work(i);
        stream.signal(done);
        while (done.load(std::memory_order_acquire) == 0) executor.wait(kForever);
    });
    return seconds / static_cast<double>(times);
}

}  // namespace ferry::train
