// The storage paths, from the configuration.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "ferry/aio.h"
#include "ferry/config.h"
#include "planner/planner.h"
#include "topology/topology.h"

namespace ferry::train {

aio::VolumeOptions volume_options(const IoConfig& io, const std::vector<NvmePath>& paths,
                                  const planner::Plan& plan, const Topology& machine,
                                  std::span<std::byte> arena, uint64_t run_id);
// Also the paths that this plan does not need: the next one may.
void check_paths(const std::vector<NvmePath>& paths);

}  // namespace ferry::train
