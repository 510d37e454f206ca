#include <charconv>
#include <string_view>

#include "cuda/gpu_queues.h"

namespace ferry {

std::string warning_of_queues(const char* given) {
    if (!given) return {};
    const std::string_view text = given;
    int queues = 0;
    const auto read = std::from_chars(text.data(), text.data() + text.size(), queues);
    const bool whole = read.ec == std::errc() && read.ptr == text.data() + text.size();
    if (whole && queues >= kQueues) return {};
    const std::string wanted = std::to_string(kQueues);
    return std::string(kQueuesVariable) + " is \"" + std::string(text) + "\", which is " +
           (whole ? "fewer queues than the GPU's streams want" : "no number of queues") +
           ": streams that share one wait for each other, and ranks that share tensors or layers "
           "may wait for good; " +
           wanted + " are wanted: unset it, or set it to " + wanted;
}

}  // namespace ferry
