#pragma once

#include "ferry/device.h"

namespace ferry {

std::unique_ptr<Device> open_cpu_device(int64_t memory_bytes, Executor& executor);

}  // namespace ferry
