// What the ranks of one machine are to each other. Needs neither MPI nor NCCL.
#pragma once

#include <array>
#include <span>
#include <string>

#include "transport.h"

namespace ferry::comm {

// One kernel, whatever containers run on it.
uint64_t machine_id();
// Of `rank`, where these are the machines of all ranks.
Place place_among(std::span<const uint64_t> machines, int rank);

// What CUDA calls a GPU and no other (cudaUUID_t).
using GpuId = std::array<char, 16>;
// By rank. Throws usage, naming both ranks, where two have the same one; `name`: of its model.
void require_own_gpus(std::span<const GpuId> gpus, const std::string& name);

}  // namespace ferry::comm
