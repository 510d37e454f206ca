#include "free_before.h"

#include <dlfcn.h>

#include <array>

namespace ferry {
namespace {

// The four calls of NVML that are needed, as its documentation declares them: toolkits without the
// driver do not bring its header.
struct Memory {
    unsigned long long total, free, used;
};
using Handle = void*;

template <class Function>
Function symbol(void* library, const char* name) {
    return reinterpret_cast<Function>(dlsym(library, name));
}

int64_t ask(void* library, const std::string& pci_bus_id) {
    const auto init = symbol<int (*)()>(library, "nvmlInit_v2");
    const auto find =
        symbol<int (*)(const char*, Handle*)>(library, "nvmlDeviceGetHandleByPciBusId_v2");
    const auto memory = symbol<int (*)(Handle, Memory*)>(library, "nvmlDeviceGetMemoryInfo");
    const auto shutdown = symbol<int (*)()>(library, "nvmlShutdown");
    if (!init || !find || !memory || !shutdown || init() != 0) return -1;
    Handle gpu = nullptr;
    Memory found{};
    const bool known = find(pci_bus_id.c_str(), &gpu) == 0 && memory(gpu, &found) == 0;
    shutdown();
    return known ? static_cast<int64_t>(found.free) : -1;
}

}  // namespace

int64_t free_bytes_of_gpu(const std::string& pci_bus_id) {
    void* library = dlopen("libnvidia-ml.so.1", RTLD_NOW);
    if (library == nullptr) return -1;
    const int64_t bytes = ask(library, pci_bus_id);
    dlclose(library);
    return bytes;
}

}  // namespace ferry
