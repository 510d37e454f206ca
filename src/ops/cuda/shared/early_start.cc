#include "early_start.h"

#include <map>
#include <mutex>
#include <shared_mutex>
#include <utility>

namespace ferry::ops::cuda {
namespace {

// By kernel and GPU. Few are written, and read at each launch.
struct Answers {
    std::shared_mutex mutex;
    std::map<std::pair<const void*, int>, bool> by_kernel;
};
Answers& answers() {
    static auto* const kAll = new Answers;  // outlives what launches at the program's end
    return *kAll;
}

}  // namespace

bool may_start_early(const void* kernel) {
    int gpu = 0;
    if (cudaGetDevice(&gpu) != cudaSuccess) return false;
    Answers& known = answers();
    {
        const std::shared_lock lock(known.mutex);
        const auto found = known.by_kernel.find({kernel, gpu});
        if (found != known.by_kernel.end()) return found->second;
    }
    cudaFuncAttributes its{};
    // No answer is not kept: check_launch() throws what went wrong.
    if (cudaFuncGetAttributes(&its, kernel) != cudaSuccess) return false;
    const bool early = its.ptxVersion >= 90;
    const std::unique_lock lock(known.mutex);
    known.by_kernel.emplace(std::pair(kernel, gpu), early);
    return early;
}

}  // namespace ferry::ops::cuda
