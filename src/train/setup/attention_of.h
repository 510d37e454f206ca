// Which earlier tokens attention sees, from the configuration.
#pragma once

#include "ferry/config.h"
#include "model/model.h"

namespace ferry::train {

// Gives the shape its patterns: the lists of each block's attention. Reads a layout's file. Throws
// usage naming the key, or the file, and what does not fit.
void set_patterns(model::Shape& shape, const Config& config);
// Logs where a layout's blocks are narrower than those of the kernels. Reading the configuration
// does so for other patterns.
void warn_of_layout(const Config& config);

}  // namespace ferry::train
