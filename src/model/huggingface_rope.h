// RoPE's settings of a config.json: rope_parameters as transformers 5 writes it, or rope_theta and
// rope_scaling as 4 did.
#pragma once

#include "json_keys.h"
#include "model/model.h"

namespace ferry::model {

// Sets the shape's theta and scaling. `context`: tokens of the longest text the model was made for.
// Throws usage, naming the key.
void read_rope(const JsonKeys& in, int64_t context, Shape& shape);

}  // namespace ferry::model
