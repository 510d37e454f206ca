#include "ferry/device.h"

#include "cpu_device.h"
#include "cuda/cuda_device.h"

namespace ferry {

DeviceKind device_from(std::string_view name) {
    FERRY_CHECK(name == "cpu" || name == "cuda", name);
    return name == "cuda" ? DeviceKind::cuda : DeviceKind::cpu;
}

std::unique_ptr<Device> Device::open(DeviceKind kind, Executor& executor, int gpu) {
    return kind == DeviceKind::cuda ? open_cuda_device(executor, gpu) : open_cpu_device(executor);
}

}  // namespace ferry
