#include "path_rows.h"

#include <algorithm>

namespace ferry::train {

PathRows::PathRows(trace::Recording* recording, const std::vector<NvmePath>& paths)
    : recording_(recording) {
    for (const NvmePath& path : paths) {
        for (const char* direction : {": read", ": write"})
            if (recording) rows_.push_back({recording->add_row("paths", path.path + direction)});
    }
}

aio::Tracer PathRows::tracer() {
    return recording_ ? aio::Tracer{.transfer = &PathRows::add, .context = this} : aio::Tracer{};
}

void PathRows::add(void* context, const aio::TransferTrace& transfer) {
    const bool read = transfer.verb == aio::Verb::read, write = transfer.verb == aio::Verb::write;
    constexpr uint64_t kNotOfAStep = 0;  // the layout, and the initial state
    if (transfer.tag == kNotOfAStep || !(read || write)) return;
    auto& rows = *static_cast<PathRows*>(context);
    Row& row = rows.rows_[2 * static_cast<size_t>(transfer.path) + (write ? 1 : 0)];
    const Nanos begin = std::max(transfer.start_ns, row.end_ns);
    row.end_ns = transfer.end_ns;
    rows.recording_->add({.row = row.id,
                          .name = transfer.error == 0 ? (read ? "read" : "write") : "failed",
                          .begin_ns = begin,
                          .end_ns = transfer.end_ns,
                          .bytes = transfer.bytes});
}

}  // namespace ferry::train
