// From the configuration to what the modules below want to be told.
#pragma once

#include <string>

#include "ferry/aio.h"
#include "ferry/config.h"
#include "ferry/model.h"
#include "ferry/planner.h"
#include "ferry/tokens.h"
#include "ferry/topology.h"

namespace ferry::train {

model::Shape shape_of(const Config& config);
model::Numerics numerics_of(const Config& config);
TokenLoader::Options loader_options(const Config& config);
aio::VolumeOptions volume_options(const Config& config, const planner::Plan& plan,
                                  std::span<std::byte> arena, uint64_t run_id);
// Refuses a plan that takes more memory than the machine has: the kernel would kill the run later.
planner::Plan within_memory(planner::Plan plan, const Topology& machine);
int worker_threads(const Config& config, const Topology& topology, const Executor& executor);

// Everything that fixes a number (docs/numerics.md), as text, and its hash: the run's identity.
std::string numerics_text(const Config& config);
uint64_t numerics_hash(const Config& config);

std::string layer_name(const std::vector<model::Layer>& layers, int64_t layer);

}  // namespace ferry::train
