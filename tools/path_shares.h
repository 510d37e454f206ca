// How what is stored divides over the paths of a host.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "ferry/config.h"

namespace ferry::tools {

// The parts of `bytes` that lie on each path: by `rates` (relative; empty: all alike), as far as
// the paths' sizes go. What is stored moves alike, so these are the parts of what is moved as well.
std::vector<double> path_shares(std::span<const NvmePath> paths, std::span<const double> rates,
                                int64_t bytes);

}  // namespace ferry::tools
