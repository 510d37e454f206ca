// Proves files of a checkpoint before a run takes values from them.
#pragma once

#include <span>
#include <string>

#include "checkpoint/manifest.h"
#include "ferry/team.h"
#include "train/stack/start_up.h"

namespace ferry::train {

// Reads every `parts`-th file, from file `part` on, and compares its checksums. The team's threads
// take a file each. Throws io, naming file and tensor.
void prove_files(const std::string& checkpoint, std::span<const checkpoint::Shard> files,
                 Team& team, int part, int parts, StartUp& start_up);

}  // namespace ferry::train
