// That every rank has a GPU of its own. Needs no NCCL.
#pragma once

#include <array>
#include <span>
#include <string>

namespace ferry::comm {

// What CUDA calls a GPU and no other (cudaUUID_t).
using GpuId = std::array<char, 16>;
// By rank. Throws usage, naming both ranks, where two have the same one; `name`: of its model.
void require_own_gpus(std::span<const GpuId> gpus, const std::string& name);

}  // namespace ferry::comm
