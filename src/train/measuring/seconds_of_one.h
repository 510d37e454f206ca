// How often something is timed, and which of the times counts.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "base/median.h"
#include "together.h"

namespace ferry::train {

// Of three. Alone the shortest, else the middle one: what the others do beside it is no
// disturbance.
template <class Time>
double of_three(const Time& time, const Together& together) {
    const std::vector<double> found{time(), time(), time()};
    return together.size() > 1 ? median(found) : std::ranges::min(found);
}

// Seconds of one run. `time`: seconds of one among so many.
template <class Time>
double seconds_of_one(const Time& time, Together& together) {
    constexpr double kShort = 2e-3;  // seconds: shorter work is repeated, its launch is not counted
    constexpr int64_t kRepeats = 20;
    double seconds = 0;
    together.run(
        [&] {
            time(1);
            const double once = time(1);
            const auto times =
                std::clamp<int64_t>(static_cast<int64_t>(kShort / once), 1, kRepeats);
            seconds = of_three([&] { return time(times); }, together);
        },
        [&] { time(1); });
    return seconds;
}

}  // namespace ferry::train
