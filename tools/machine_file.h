// The machine file: measured figures of this machine, as JSON, for `ferry plan` and `ferry train`.
// docs/machine.md has its keys.
#pragma once

#include <string>
#include <vector>

#include "bench_io.h"

namespace ferry::tools {

constexpr int kMachineFormat = 1;

// Before a measurement: throws usage where the file could not be written afterwards, or is there
// and is no machine file of a format that is understood.
void check_machine_file(const std::string& file);

// What the file says of each path.
nlohmann::json settings_json(const std::vector<IoSettings>& paths);

// Replaces the figures of these paths, keeps everything else that the file holds, unknown keys too.
// The old file stays until the new one is whole. Throws io.
void save_paths(const std::string& file, const std::vector<IoSettings>& paths);

}  // namespace ferry::tools
