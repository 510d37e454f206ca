// Which ranks share a machine, and which GPU each takes. Needs neither MPI nor NCCL.
#pragma once

#include <array>
#include <span>
#include <string>

#include "transport.h"

namespace ferry::comm {

// One kernel, whatever containers run on it.
uint64_t machine_id();
// The place of `rank`, where these are the machines of all ranks.
RankPlace place_among(std::span<const uint64_t> machines, int rank);

// The id by which CUDA tells a GPU from all others (cudaUUID_t).
using GpuId = std::array<char, 16>;
// `gpus`: by rank. Throws usage, naming both ranks, where two have the same; `name`: of its model.
void require_own_gpus(std::span<const GpuId> gpus, const std::string& name);

}  // namespace ferry::comm
