// Memory for transfers of aio's own: layout and probes.
#pragma once

#include <cstddef>
#include <cstdlib>
#include <memory>

#include "base/process_limits.h"
#include "ferry/error.h"

namespace ferry::aio {

struct FreeAligned {
    void operator()(std::byte* memory) const { std::free(memory); }
};
using AlignedBuffer = std::unique_ptr<std::byte, FreeAligned>;

// `bytes` is a multiple of `alignment`. Throws Error(does_not_fit).
inline AlignedBuffer aligned_buffer(int64_t alignment, int64_t bytes) {
    void* memory = nullptr;
    if (posix_memalign(&memory, static_cast<size_t>(alignment), static_cast<size_t>(bytes)) != 0)
        throw Error(Trouble::does_not_fit,
                    {.what = "no memory for an I/O buffer",
                     .where = "opening a volume",
                     .measured = std::to_string(bytes) + " bytes asked for",
                     .limit = address_space_limit(),
                     .remedy = "free some memory, or raise the limit (ulimit -v, cgroup)"});
    return AlignedBuffer(static_cast<std::byte*>(memory));
}

}  // namespace ferry::aio
