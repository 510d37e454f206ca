// The storage paths in a run's trace: a row for the reads of each of their rings and one for the
// writes.
#pragma once

#include <vector>

#include "ferry/aio.h"
#include "ferry/config.h"
#include "trace/trace.h"

namespace ferry::train {

class PathRows {
public:
    // Without a recording there is nothing to do, and the tracer is none.
    PathRows(trace::Recording* recording, const std::vector<NvmePath>& paths, int rings);
    // Outlives the volume that it is given to, which has these paths and rings.
    aio::Tracer tracer();

private:
    // Transfers overlap, but slices of a row must not. So each slice begins where the one before it
    // ended.
    struct Row {
        trace::RowId id = 0;
        Nanos end_ns = 0;
    };
    static void add(void* context, const aio::TransferTrace& transfer);

    trace::Recording* recording_;
    size_t rings_;  // a path
    std::vector<Row>
        rows_{};  // path by path, ring by ring, reads first; each belong to their ring's thread
};

}  // namespace ferry::train
