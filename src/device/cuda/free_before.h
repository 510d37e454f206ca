// Free memory of a GPU by the driver's management library, which needs no context.
#pragma once

#include <cstdint>
#include <string>

namespace ferry {

// Free bytes of the GPU with this PCI bus id, or -1 where the library (libnvidia-ml.so.1) cannot
// say.
int64_t free_bytes_of_gpu(const std::string& pci_bus_id);

}  // namespace ferry
