#pragma once

#include "ferry/device.h"

namespace ferry {

// Refuses in a build without CUDA (no_cuda.cc).
std::unique_ptr<Device> open_cuda_device(Executor& executor, int gpu);

}  // namespace ferry
