#include "cuda/visible_gpus.h"

#include <sstream>
#include <vector>

#include "ferry/error.h"

namespace ferry {

std::string only_gpu(const char* given, int gpu) {
    if (!given) return std::to_string(gpu);
    std::vector<std::string> ids;
    std::istringstream list(given);
    for (std::string id; std::getline(list, id, ',');) ids.push_back(id);
    const auto at = static_cast<size_t>(gpu);
    if (at < ids.size()) return ids[at];
    throw Error(Trouble::usage,
                {.what = "this host has fewer GPUs than ranks",
                 .where = "CUDA_VISIBLE_DEVICES",
                 .measured = "\"" + std::string(given) + "\", for rank " + std::to_string(gpu) +
                             " of those that see it",
                 .remedy = "start fewer ranks on it, or let every rank see all GPUs of "
                           "its host, by srun --gpus-per-node=N --gpu-bind=none or "
                           "by CUDA_VISIBLE_DEVICES: each takes its own"});
}

}  // namespace ferry
