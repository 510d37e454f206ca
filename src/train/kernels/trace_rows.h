// The rows of a run's trace: what each lane did, and beside it what the plan predicts for it.
#pragma once

#include <algorithm>
#include <array>
#include <mutex>
#include <vector>

#include "ferry/team.h"
#include "swap/schedule.h"
#include "trace/trace.h"

namespace ferry::train {

class TraceRows {
public:
    // Does nothing where there is no recording. `lanes`: only the first so many get rows.
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

// Rows for the parts of a checkpoint. The run reads them and copies them aside, and another thread
// writes them meanwhile.
class CheckpointRows {
public:
    // Nothing where there is no recording.
    CheckpointRows(trace::Recording* recording, const Executor& executor);

    enum class Row : uint8_t { read, write };
    // One thread a row: notes what it did since its last call of begin() or note().
    void begin(Row row);
    void note(Row row, std::string_view what, int64_t bytes, int64_t step, int64_t layer = -1);

private:
    trace::Recording* recording_;
    const Executor& executor_;
    std::array<trace::RowId, 2> rows_{};
    std::array<Nanos, 2> since_{};
};

// Rows for each thread's part of the team lane's tasks. Two tasks at once have separate rows: a
// thread works for both in turn, and slices of a row must not overlap.
class WorkerRows {
public:
    // Nothing where there is no recording.
    WorkerRows(trace::Recording* recording, const NodeTeams& teams);

    // `about` is the whole task; its bytes are divided among those who worked on it. Any thread.
    template <class Work>
    void record(const trace::Slice& about, const Work& work) {
        if (!recording_) return work();
        std::unique_lock lock(sheets_[0].in_use, std::try_to_lock);
        Sheet& sheet = sheets_[lock ? 0 : 1];
        if (!lock) lock = std::unique_lock(sheet.in_use);
        std::ranges::fill(sheet.workers, Timesheet::Worker{});
        {
            const Timesheet noted(sheet.workers);
            work();
        }
        write(about, sheet);
    }

private:
    struct Sheet {
        std::mutex in_use{};
        std::vector<trace::RowId> rows{};
        std::vector<Timesheet::Worker> workers{};
    };
    void write(trace::Slice slice, const Sheet& sheet);

    trace::Recording* recording_;
    std::array<Sheet, 2> sheets_{};
};

}  // namespace ferry::train
