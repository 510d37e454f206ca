// Which GPU a rank is left with. Calls nothing of CUDA, and is built and tested without it too.
#pragma once

#include <string>

namespace ferry {

// The value of CUDA_VISIBLE_DEVICES that leaves a process only the `gpu`-th, from 0, of the GPUs
// that it would see by `given`, the value so far; null: it has none. Throws usage where `given` has
// fewer.
std::string only_gpu(const char* given, int gpu);

}  // namespace ferry
