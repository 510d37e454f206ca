// Pictures of bandwidth over block size and depth.
#pragma once

#include <string>

#include "bench_io.h"

namespace ferry::tools {

// Small multiples, a row for each place and a column for each kind of access; a line for each
// depth. Readable on light and on dark ground. `caption`: machine and date.
std::string svg_of(const IoResult& result, const std::string& caption);

// The same for a terminal: a block for each place and kind of access, depths down, block sizes
// across, shaded by the share of the highest bandwidth there.
std::string heat_maps_of(const IoResult& result);

}  // namespace ferry::tools
