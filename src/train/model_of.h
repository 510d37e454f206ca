// What is trained, from the configuration.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "ferry/config.h"
#include "model/huggingface.h"
#include "model/model.h"

namespace ferry::train {

// The model's shape and context, from the configuration's own keys or its Hugging Face directory.
model::Description model_of(const Config& config);
model::Numerics numerics_of(const Config& config);
std::string layer_name(const std::vector<model::Layer>& layers, int64_t layer);

}  // namespace ferry::train
