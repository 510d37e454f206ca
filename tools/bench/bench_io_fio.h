// ferry beside fio, in turns, on the same files: `ferry bench io --compare-fio`.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "bench_io.h"

namespace ferry::tools {

struct FioRows {
    std::vector<BenchRow> rows{};
    std::vector<std::string> left_out{};  // for want of room
    std::optional<Error> ended_by{};      // why the rest was not measured
};

// Rows of bandwidth and of CPU time for every access, block size and depth of the bench, each
// without and with integrity, against fio with as many jobs as ferry has rings, the same depth and
// the same files. Ends early, with the rows that are whole, when interrupted or when something
// fails. Throws Error where there are none by then.
FioRows compare_with_fio(const IoBench& bench);

}  // namespace ferry::tools
