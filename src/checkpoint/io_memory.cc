#include "io_memory.h"

#include <sys/mman.h>

#include <cerrno>
#include <cstring>

#include "base/process_limits.h"
#include "ferry/error.h"
#include "ferry/units.h"

namespace ferry::checkpoint {

IoMemory::IoMemory(int64_t bytes) {
    constexpr int64_t kHugePage = 2 * kMiB;
    const int64_t whole = round_up(bytes, kHugePage);
    mapped_bytes_ = static_cast<size_t>(whole + kHugePage);
    mapped_ =
        ::mmap(nullptr, mapped_bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (mapped_ == MAP_FAILED)
        throw Error(Trouble::does_not_fit,
                    {.what = "no memory for the transfers of a checkpoint",
                     .measured = std::strerror(errno),
                     .limit = address_space_limit(),
                     .remedy = "free some memory, or raise the limit (ulimit -v, cgroup)"});
    const auto address = static_cast<int64_t>(reinterpret_cast<uintptr_t>(mapped_));
    auto* const aligned =
        static_cast<std::byte*>(mapped_) + (round_up(address, kHugePage) - address);
    ::madvise(aligned, static_cast<size_t>(whole), MADV_HUGEPAGE);  // a wish
    memory_ = {aligned, static_cast<size_t>(bytes)};
}

IoMemory::~IoMemory() { ::munmap(mapped_, mapped_bytes_); }

}  // namespace ferry::checkpoint
