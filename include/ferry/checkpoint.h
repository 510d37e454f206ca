// Weights in and out of safetensors files (https://huggingface.co/docs/safetensors).
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "ferry/base.h"

namespace ferry::checkpoint {

struct TensorInfo {
    std::string name{};
    std::vector<int64_t> shape{};
};

// Writes fp32 tensors in the order given, one at a time: `read(i)` returns tensor i's elements, row
// major, and its memory is all that is held. The file appears whole or not at all (a temporary file
// beside it, flushed, then renamed). Throws Trouble::io.
void write_safetensors(const std::string& path, const std::vector<TensorInfo>& tensors,
                       const std::function<std::vector<float>(size_t)>& read);

}  // namespace ferry::checkpoint
