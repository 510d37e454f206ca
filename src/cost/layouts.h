// The best layouts of many ranks: all that divide them are weighed (cost/layout_seconds.h).
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "cost/layout_seconds.h"

namespace ferry::cost {

// What the user has chosen already; the rest is searched.
struct FixedLayout {
    std::optional<int64_t> tensor{}, sequence{}, pipeline{}, virtual_stages{}, zero_stage{};
    std::span<const Order> orders = kOrders;  // that a pipeline may have
    // Whether what is chosen says something of several stages alone: one stage is then no choice.
    bool needs_stages() const;
};

// Bounds of the search: sequences of a micro-batch, and micro-batches of a group, unless it is all.
inline constexpr int64_t kMostSequences = 16, kMostOfAGroup = 64;
// Whether a layout has the most of them that were tried, and more would divide its batch.
struct AtBound {
    bool sequences = false, group = false;
};
AtBound at_bound(const Layout& of);

// The fastest that fit, at most so many, the fastest first; of each (tensor, sequence, pipeline,
// replicas) the best one alone. Groups that share tensors stay inside a host, unless the user has
// chosen others. None: nothing fits, or with none weighed no ranks can be divided so. Stage 2 is
// weighed where it is chosen alone: ranks share out there what they do at stage 1. Stage 0 keeps
// all state on every rank: unless it is chosen it stands where it is faster than the others by more
// than the arithmetic errs, and else is `set_aside`: the fastest of these, if it is faster than the
// best one.
struct FoundLayouts {
    std::vector<Layout> best{};
    int64_t weighed = 0;
    std::optional<Layout> set_aside{};
};
FoundLayouts best_layouts(const ModelSizes& model, const Cluster& cluster, size_t most,
                          const FixedLayout& fixed = {});

}  // namespace ferry::cost
