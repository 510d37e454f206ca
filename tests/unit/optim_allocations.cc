// An update allocates nothing: every way to the heap is counted while one runs.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <limits>

#include "ferry/learning_rate.h"
#include "tests/unit/optim_arrays.h"

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

namespace ferry::optim {
namespace {

// In ten goes, after some in which TBB's loops fill the pools that later ones live on. The least of
// a few tries: on a busy machine a worker may come late, and its pool with it.
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

TEST(Allocations, are_counted) {
    volatile size_t size = 100;
    EXPECT_EQ(allocations_of([&] { ::operator delete(::operator new(size)); }), 10);
    EXPECT_EQ(allocations_of([&] { std::free(std::aligned_alloc(64, 64 * size)); }), 10);
    Team two(2);
    EXPECT_GE(allocations_of([&] {
                  two.parallel(4, [&](int64_t) { ::operator delete(::operator new(size)); });
              }),
              40);
}

TEST(Allocations, of_an_update_are_none) {
    const Method methods[] = {Method::adamw, Method::adam, Method::sgd, Method::lion,
                              Method::adagrad};
    Team one(1), two(2), five(5);
    NodeTeams nodes({.nodes = {{.os_index = 0, .cores = {0}}, {.os_index = 1, .cores = {1}}}}, 2);
    for (const Method method : methods) {
        Hyper hyper{.method = method, .weight_decay = 0.1};
        hyper.momentum = method == Method::sgd ? 0.9 : 0;
        const Scalars scalars = scalars_of(hyper, 3, 0.5);
        // With a tail, over several tiles, in place and out of place.
        for (const bool out_of_place : {false, true}) {
            Arrays arrays({.count = 200001,
                           .gradient_type = DType::bf16,
                           .out_of_place = out_of_place,
                           .positive_m = method == Method::adagrad});
            const Span span = arrays.span();
            EXPECT_EQ(allocations_of([&] { update(span, scalars); }), 0) << name_of(method);
            for (Team* team : {&one, &two, &five}) {
                EXPECT_EQ(allocations_of([&] { update(*team, span, scalars); }), 0)
                    << name_of(method) << " on " << team->threads();
            }
            EXPECT_EQ(allocations_of([&] { update(nodes, span, scalars); }), 0)
                << name_of(method) << " on two nodes";
        }
    }
}

TEST(Allocations, of_norms_casts_and_scalars_are_none) {
    Arrays arrays({.count = 200001, .gradient_type = DType::bf16});
    const Span span = arrays.span();
    std::vector<float> leaves(static_cast<size_t>(leaves_of(span.count)));
    Team two(2);
    EXPECT_EQ(allocations_of(
                  [&] { leaf_norms(two, span.gradient, DType::bf16, span.count, leaves.data()); }),
              0);
    EXPECT_EQ(allocations_of([&] { recast(span.p_in, span.count, DType::bf16, span.weight); }), 0);
    EXPECT_EQ(allocations_of([&] {
                  scalars_of({}, 3, clip_factor(std::sqrt(sum_leaves(leaves)), 1));
                  learning_rate({}, 3);
              }),
              0);
}

}  // namespace
}  // namespace ferry::optim

#else

TEST(Allocations, of_an_update_are_none) { GTEST_SKIP() << "a sanitizer holds the heap"; }

#endif
