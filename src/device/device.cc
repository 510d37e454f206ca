#include "ferry/device.h"

#include "cpu_device.h"

namespace ferry {

std::unique_ptr<Device> Device::open(DeviceKind kind, int64_t memory_bytes, Executor& executor) {
    if (kind == DeviceKind::cpu) return open_cpu_device(memory_bytes, executor);
    throw Error(Trouble::usage, {.what = "this build of ferry has no CUDA device",
                                 .remedy = "build with nvcc, or use the cpu device"});
}

}  // namespace ferry
