#include "huge_pages.h"

#include <sys/prctl.h>

#include <cinttypes>
#include <cstdio>
#include <fstream>

#include "ferry/units.h"

namespace ferry::pinned_mem {

int64_t huge_bytes_of(std::span<const std::byte> memory) {
    const auto first = reinterpret_cast<uintptr_t>(memory.data());
    std::ifstream file("/proc/self/smaps");
    std::string line;
    bool inside = false;
    int64_t kib = 0, sum = 0;
    while (std::getline(file, line)) {
        uintptr_t begin = 0, end = 0;
        if (std::sscanf(line.c_str(), "%" SCNxPTR "-%" SCNxPTR " ", &begin, &end) == 2)
            inside = begin >= first && begin < first + memory.size();
        else if (inside && std::sscanf(line.c_str(), "AnonHugePages: %" SCNd64, &kib) == 1)
            sum += kib * kKiB;
    }
    return sum;
}

std::string why_not_huge() {
    if (prctl(PR_GET_THP_DISABLE, 0, 0, 0, 0) == 1)
        return "this process was started without them (PR_SET_THP_DISABLE)";
    const std::string setting = "/sys/kernel/mm/transparent_hugepage/enabled";
    std::string modes;
    std::getline(std::ifstream(setting), modes);
    if (modes.empty()) return "the kernel has none (" + setting + ")";
    if (modes.find("[never]") != std::string::npos) return setting + " is \"never\"";
    return "memory is fragmented, or as good as full";
}

}  // namespace ferry::pinned_mem
