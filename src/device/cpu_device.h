#pragma once

#include "ferry/device.h"

namespace ferry {

std::unique_ptr<Device> open_cpu_device(Executor& executor);

}  // namespace ferry
