// Counts every way to the heap of a whole test program, in whatever thread: included by one of its
// sources.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <limits>

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define FERRY_HEAP_IS_TAKEN 1  // the sanitizer has replaced malloc itself
#endif

#ifndef FERRY_HEAP_IS_TAKEN

namespace {
std::atomic<int64_t> allocations{0};
}

// glibc's own names for what the ones below stand in front of. operator new and TBB end here too.
extern "C" {
void* __libc_malloc(size_t bytes);
void* __libc_calloc(size_t count, size_t bytes);
void* __libc_realloc(void* old, size_t bytes);
void* __libc_memalign(size_t alignment, size_t bytes);

void* malloc(size_t bytes) {
    ++allocations;
    return __libc_malloc(bytes);
}
void* calloc(size_t count, size_t bytes) {
    ++allocations;
    return __libc_calloc(count, bytes);
}
void* realloc(void* old, size_t bytes) {
    ++allocations;
    return __libc_realloc(old, bytes);
}
void* memalign(size_t alignment, size_t bytes) {
    ++allocations;
    return __libc_memalign(alignment, bytes);
}
void* aligned_alloc(size_t alignment, size_t bytes) {
    ++allocations;
    return __libc_memalign(alignment, bytes);
}
int posix_memalign(void** out, size_t alignment, size_t bytes) {
    ++allocations;
    *out = __libc_memalign(alignment, bytes);
    return *out ? 0 : 12;  // ENOMEM
}
}

namespace ferry {

// In ten goes, after some in which pools and buffers are filled that later ones live on. The least
// of a few tries: on a busy machine a thread may come late, and its pool with it.
template <class Work>
int64_t allocations_of(const Work& work) {
    for (int go = 0; go < 20; ++go) work();
    int64_t least = std::numeric_limits<int64_t>::max();
    for (int attempt = 0; attempt < 5 && least > 0; ++attempt) {
        const int64_t before = allocations;
        for (int go = 0; go < 10; ++go) work();
        least = std::min<int64_t>(least, allocations - before);
    }
    return least;
}

}  // namespace ferry

#endif
