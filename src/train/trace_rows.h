// The rows of a run's trace: what each lane did, and beside it what it should.
#pragma once

#include <array>

#include "ferry/schedule.h"
#include "ferry/swap.h"
#include "ferry/trace.h"

namespace ferry::train {

class TraceRows {
public:
    // Nothing where there is no recording. `lanes`: the first so many.
    TraceRows(trace::Recording* recording, size_t lanes);

    // What the store writes to.
    const std::array<trace::RowId, swap::kLanes>& measured() const { return measured_; }
    // What the schedule's tasks should take, from `start` on.
    void record(const swap::Schedule& schedule, const swap::Timeline& planned, Nanos start,
                int64_t step);

private:
    trace::Recording* recording_;
    std::array<trace::RowId, swap::kLanes> measured_{}, planned_{};
};

}  // namespace ferry::train
