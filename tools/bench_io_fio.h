// ferry beside fio, in turns, on the same files: `ferry bench io --compare-fio`.
#pragma once

#include <vector>

#include "bench_io.h"

namespace ferry::tools {

// Rows of bandwidth and of CPU time for every access, block size and depth of the bench, each
// without and with integrity, against fio with as many jobs as ferry has rings, the same depth and
// the same files. What there is no room for is named in `left_out`. Ends early, with the rows that
// are whole, when interrupted. Throws Error.
std::vector<Row> compare_with_fio(const IoBench& bench, std::vector<std::string>& left_out);

}  // namespace ferry::tools
