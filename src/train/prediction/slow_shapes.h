// Operations that kernels do a slower way for a model's shape alone: no GPU is asked.
#pragma once

#include <vector>

#include "model/model.h"
#include "ops/slow_paths.h"
#include "width_costs.h"

namespace ferry::train {

// Of a rank's slice of the shape, in a step of so many micro-batches on a GPU. Their cost is bytes:
// what the slower way moves, and what the fast one would, at an H100's rate; of a width that is no
// multiple of kWidthUnit the measured factor over it. What is computed again is not counted.
std::vector<ops::SlowPath> slow_shapes(const model::Shape& shape, const model::Numerics& numerics,
                                       int64_t micro_batches,
                                       std::span<const WidthCost> costs = width_costs());

}  // namespace ferry::train
