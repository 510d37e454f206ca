#include "blas_buffers.h"

#include <cblas.h>
#include <sys/mman.h>
#include <sys/resource.h>

#include <barrier>
#include <cerrno>
#include <cstring>
#include <system_error>
#include <thread>
#include <vector>

#include "ferry/error.h"
#include "ferry/units.h"

namespace ferry::ops {
namespace {

// Of one thread, in the distributions' builds; and a thread's stack, with what malloc keeps for it.
constexpr int64_t kBufferBytes = 128 * kMiB, kThreadBytes = 72 * kMiB;

[[noreturn]] void refuse(int threads, int64_t bytes, const char* reason) {
    rlimit limit{};
    const bool limited = getrlimit(RLIMIT_AS, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY;
    throw Error(Trouble::does_not_fit,
                {.what = "there is no room for the buffers that OpenBLAS works in",
                 .where = "threads",
                 .measured = format_bytes(bytes) + " of address space for " +
                             std::to_string(threads) + " threads: " + reason,
                 .limit = limited ? format_bytes(static_cast<int64_t>(limit.rlim_cur)) +
                                        " for the process (ulimit -v)"
                                  : std::string(),
                 .remedy = "raise that limit, or lower threads"});
}

void multiply_once() {
    constexpr int kEdge = 64;  // above the sizes that are multiplied without a buffer
    std::vector<float> a(size_t{kEdge} * kEdge, 1), c(a);
    cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasNoTrans, kEdge, kEdge, kEdge, 1, a.data(), kEdge,
                a.data(), kEdge, 0, c.data(), kEdge);
}

}  // namespace

void reserve_blas_buffers(int threads) {
    const int64_t bytes = threads * (kBufferBytes + kThreadBytes);
    void* const room = mmap(nullptr, static_cast<size_t>(bytes), PROT_NONE,
                            MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (room == MAP_FAILED) refuse(threads, bytes, std::strerror(errno));
    munmap(room, static_cast<size_t>(bytes));
    // All at the same time, as each buffer goes to whoever needs one next.
    std::barrier together(threads);
    std::vector<std::jthread> others;
    try {
        for (int i = 1; i < threads; ++i) {
            others.emplace_back([&together] {
                together.arrive_and_wait();
                for (int k = 0; k < 8; ++k) multiply_once();
            });
        }
    } catch (const std::system_error& error) {
        for (int i = static_cast<int>(others.size()) + 1; i < threads; ++i)
            together.arrive_and_drop();
        together.arrive_and_drop();
        refuse(threads, bytes, error.what());
    }
    together.arrive_and_wait();
    for (int k = 0; k < 8; ++k) multiply_once();
}

}  // namespace ferry::ops
