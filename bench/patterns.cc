// How long the lists of a pattern of attention take to build, on one thread.
//   bench_patterns [TOKENS]
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>

#include "ops/patterns.h"

namespace {

using namespace ferry::ops;

constexpr int64_t kHeads = 32;

struct Named {
    const char* name;
    Pattern pattern;
};

const Named kPatterns[] = {
    {"dense", {}},
    {"window of 56 blocks", {.kind = PatternKind::window, .num_sliding_window_blocks = 113}},
    {"fixed", {.kind = PatternKind::fixed}},
    {"fixed, 4 patterns, a layout a head",
     {.kind = PatternKind::fixed,
      .different_layout_per_head = true,
      .num_different_global_patterns = 4}},
    {"fixed, blocks of 16", {.kind = PatternKind::fixed, .block = 16}},
    {"bigbird", {.kind = PatternKind::bigbird, .num_random_blocks = 3}},
    {"bigbird, a layout a head",
     {.kind = PatternKind::bigbird, .different_layout_per_head = true, .num_random_blocks = 3}},
    {"longformer", {.kind = PatternKind::longformer, .num_sliding_window_blocks = 113}},
    {"variable", {.kind = PatternKind::variable, .num_random_blocks = 3}},
};

// The fastest of several: other work on the machine only slows.
double milliseconds(const Pattern& pattern, int64_t tokens, BlockLists& lists) {
    double best = 1e9;
    for (int i = 0; i < 7; ++i) {
        const auto begin = std::chrono::steady_clock::now();
        lists = lists_of(pattern, tokens, kHeads, 0);
        const std::chrono::duration<double, std::milli> took =
            std::chrono::steady_clock::now() - begin;
        best = std::min(best, took.count());
    }
    return best;
}

}  // namespace

int main(int argc, char** argv) {
    const int64_t tokens = argc > 1 ? std::atoll(argv[1]) : 32768;
    std::printf("%lld tokens, %lld heads\n", static_cast<long long>(tokens),
                static_cast<long long>(kHeads));
    for (const Named& named : kPatterns) {
        BlockLists lists;
        const double ms = milliseconds(named.pattern, tokens, lists);
        std::printf("  %-36s %8.2f ms  %5.1f %% of the causal mask's blocks, %lld KiB\n",
                    named.name, ms,
                    100 * static_cast<double>(lists.visible_blocks()) /
                        static_cast<double>(lists.causal_blocks()),
                    static_cast<long long>(lists.memory_bytes() / 1024));
    }
}
