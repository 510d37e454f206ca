#include "trace_rows.h"

#include "cost/operation_table.h"

namespace ferry::train {

TraceRows::TraceRows(trace::Recording* recording, size_t lanes) : recording_(recording) {
    for (size_t lane = 0; recording_ && lane < lanes; ++lane) {
        const std::string name(swap::name_of(static_cast<swap::Lane>(lane)));
        measured_[lane] = recording_->add_row("measured", name);
        planned_[lane] = recording_->add_row("planned", name);
    }
}

void TraceRows::record(const swap::Schedule& schedule, const swap::Timeline& planned, Nanos start,
                       int64_t step) {
    for (size_t t = 0; t < planned.tasks.size(); ++t) {
        const swap::Task& task = schedule.tasks[t];
        const auto at = [&](double seconds) { return start + static_cast<Nanos>(seconds * 1e9); };
        recording_->add({.row = planned_[static_cast<size_t>(task.lane)],
                         .name = cost::name_of(task),
                         .begin_ns = at(planned.tasks[t].begin_s),
                         .end_ns = at(planned.tasks[t].end_s),
                         .bytes = task.bytes,
                         .step = step,
                         .layer = task.layer,
                         .item = task.item});
    }
}

CheckpointRows::CheckpointRows(trace::Recording* recording, const Executor& executor)
    : recording_(recording), executor_(executor) {
    if (!recording_) return;
    rows_ = {recording_->add_row("checkpoint", "read"), recording_->add_row("checkpoint", "write")};
}

void CheckpointRows::begin(Row row) {
    if (recording_) since_[static_cast<size_t>(row)] = executor_.now();
}

void CheckpointRows::note(Row row, std::string_view what, int64_t bytes, int64_t step,
                          int64_t layer) {
    if (!recording_) return;
    Nanos& since = since_[static_cast<size_t>(row)];
    const Nanos now = executor_.now();
    recording_->add({.row = rows_[static_cast<size_t>(row)],
                     .name = what,
                     .begin_ns = since,
                     .end_ns = now,
                     .bytes = bytes,
                     .step = step,
                     .layer = layer});
    since = now;
}

WorkerRows::WorkerRows(trace::Recording* recording, const NodeTeams& teams)
    : recording_(recording) {
    if (!recording_) return;
    for (size_t i = 0; i < sheets_.size(); ++i) {
        for (int worker = 0; worker < teams.workers(); ++worker)
            sheets_[i].rows.push_back(recording_->add_row(
                "team's threads",
                teams.name_of_worker(worker) + (i == 0 ? "" : ", of a second task")));
        sheets_[i].workers.resize(sheets_[i].rows.size());
    }
}

void WorkerRows::write(trace::Slice slice, const Sheet& sheet) {
    int64_t all = 0;
    for (const Timesheet::Worker& worker : sheet.workers) all += worker.bodies;
    const int64_t bytes = slice.bytes;
    for (size_t i = 0; i < sheet.workers.size(); ++i) {
        const Timesheet::Worker& worker = sheet.workers[i];
        if (worker.bodies == 0) continue;
        slice.row = sheet.rows[i];
        slice.begin_ns = worker.begin;
        slice.end_ns = worker.end;
        slice.bytes = bytes * worker.bodies / all;
        recording_->add(slice);
    }
}

}  // namespace ferry::train
