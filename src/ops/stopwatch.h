// The time between points of a compute stream.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "ferry/device.h"

namespace ferry::ops {

class Stopwatch {
public:
    virtual ~Stopwatch() = default;
    virtual void mark() = 0;
    // Waits for the last mark; the times between each and the next. Forgets them.
    virtual std::vector<double> seconds() = 0;
    // Launches that `work` makes, without running it where the device can tell; -1: it cannot.
    virtual int64_t launches(const std::function<void()>& work) = 0;
};

std::unique_ptr<Stopwatch> make_cuda_stopwatch(Device& device);

}  // namespace ferry::ops
