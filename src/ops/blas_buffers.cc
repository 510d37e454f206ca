#include "blas_buffers.h"

#include <sys/mman.h>

#include <cerrno>
#include <cstring>
#include <vector>

#include "base/process_limits.h"
#include "blas.h"
#include "ferry/error.h"
#include "ferry/units.h"

namespace ferry::ops {
namespace {

// Size of one thread's buffer, in the distributions' builds.
constexpr int64_t kBufferBytes = 128 * kMiB;

// OpenBLAS asks again for ever where it gets none, so nobody may ask it before.
void require_room(int threads) {
    void* const room = mmap(nullptr, size_t{kBufferBytes}, PROT_NONE,
                            MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (room != MAP_FAILED) {
        munmap(room, size_t{kBufferBytes});
        return;
    }
    throw Error(Trouble::does_not_fit,
                {.what = "there is no room for the buffers that OpenBLAS works in",
                 .where = "threads",
                 .measured = format_bytes(threads * kBufferBytes) + " of address space for " +
                             std::to_string(threads) + " threads: " + std::strerror(errno),
                 .limit = address_space_limit(),
                 .remedy = "raise that limit, or lower threads"});
}

}  // namespace

void reserve_blas_buffers(int threads) {
    const Blas& library = blas();
    // One thread takes them all: nothing else need be started, and none is taken twice.
    struct Taken {
        ~Taken() {
            for (void* buffer : buffers) library.give_buffer(buffer);
        }
        const Blas& library;
        std::vector<void*> buffers{};
    } taken{library};
    taken.buffers.reserve(static_cast<size_t>(threads));
    for (int i = 0; i < threads; ++i) {
        require_room(threads);
        if (library.take_buffer == nullptr) return;
        void* const buffer = library.take_buffer(1);
        if (buffer == nullptr) return;  // more than it has places for: these wait for their turn
        taken.buffers.push_back(buffer);
    }
}

}  // namespace ferry::ops
