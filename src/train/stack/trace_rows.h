// The rows of a run's trace: what each lane did, and beside it what it should.
#pragma once

#include <algorithm>
#include <array>
#include <vector>

#include "ferry/swap.h"
#include "ferry/team.h"
#include "swap/schedule.h"
#include "trace/trace.h"

namespace ferry::train {

class TraceRows {
public:
    // Nothing where there is no recording. `lanes`: the first so many.
    TraceRows(trace::Recording* recording, size_t lanes);

    // The rows that the store writes to.
    const std::array<trace::RowId, swap::kLanes>& measured() const { return measured_; }
    // Draws the planned times of the schedule's tasks, from `start` on.
    void record(const swap::Schedule& schedule, const swap::Timeline& planned, Nanos start,
                int64_t step);

private:
    trace::Recording* recording_;
    std::array<trace::RowId, swap::kLanes> measured_{}, planned_{};
};

// Each thread's part of the team lane's tasks.
class WorkerRows {
public:
    // Nothing where there is no recording.
    WorkerRows(trace::Recording* recording, const NodeTeams& teams);

    // `about` is the whole task; its bytes are divided among those who worked on it. One thread.
    template <class Work>
    void record(const trace::Slice& about, const Work& work) {
        if (!recording_) return work();
        std::ranges::fill(sheet_, Timesheet::Worker{});
        {
            const Timesheet noted(sheet_);
            work();
        }
        write(about);
    }

private:
    void write(trace::Slice slice);

    trace::Recording* recording_;
    std::vector<trace::RowId> rows_{};
    std::vector<Timesheet::Worker> sheet_{};
};

}  // namespace ferry::train
