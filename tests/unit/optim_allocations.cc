// An update allocates nothing: every way to the heap is counted while one runs.
#include <gtest/gtest.h>

#include <cstdlib>

#include "ferry/learning_rate.h"
#include "tests/support/count_allocations.h"
#include "tests/unit/optim_arrays.h"
#include "topology/topology.h"

#ifndef FERRY_HEAP_IS_TAKEN

namespace ferry::optim {
namespace {

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
