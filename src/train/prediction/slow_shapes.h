// Operations that kernels do a slower way for a model's shape alone: no GPU is asked.
#pragma once

#include <vector>

#include "model/model.h"
#include "ops/slow_paths.h"

namespace ferry::train {

// Of a step of so many micro-batches on a GPU. Their cost is bytes: what the slower way moves, and
// what the fast one would, at an H100's rate. What is computed again is not counted.
std::vector<ops::SlowPath> slow_shapes(const model::Shape& shape, const model::Numerics& numerics,
                                       int64_t micro_batches);

}  // namespace ferry::train
