#include "path_rows.h"

#include <algorithm>

namespace ferry::train {

PathRows::PathRows(trace::Recording* recording, const std::vector<NvmePath>& paths, int rings)
    : recording_(recording), rings_(static_cast<size_t>(rings)) {
    if (!recording) return;
    for (const NvmePath& path : paths) {
        for (size_t ring = 0; ring < rings_; ++ring) {
            const std::string which = rings_ > 1 ? ", ring " + std::to_string(ring) : "";
            for (const char* direction : {": read", ": write"})
                rows_.push_back({recording->add_row("paths", path.path + direction + which)});
        }
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
    const size_t ring =
        static_cast<size_t>(transfer.path) * rows.rings_ + static_cast<size_t>(transfer.ring);
    Row& row = rows.rows_[2 * ring + (write ? 1 : 0)];
    const Nanos begin = std::max(transfer.start_ns, row.end_ns);
    row.end_ns = transfer.end_ns;
    rows.recording_->add({.row = row.id,
                          .name = transfer.error == 0 ? (read ? "read" : "write") : "failed",
                          .begin_ns = begin,
                          .end_ns = transfer.end_ns,
                          .bytes = transfer.bytes});
}

}  // namespace ferry::train
