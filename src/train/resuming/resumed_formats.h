// A run goes on with the formats of the state that it was started with.
#pragma once

#include <span>
#include <string>

#include "ferry/config.h"
#include "model/model.h"

namespace ferry::train {

// Throws usage, naming both, where the durable state at the first of the paths differs from this
// run's in the formats of master and moments alone. Does nothing where it does not, or where
// nothing is known. `paths`: this rank's own. `machine`: machine_text() of it.
void require_recorded_formats(const Config& config, std::span<const NvmePath> paths,
                              const model::Shape& shape, const std::string& machine, int ranks);

}  // namespace ferry::train
