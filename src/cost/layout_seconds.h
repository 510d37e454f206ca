// What a step takes in a layout of ranks, and the memory of it. By arithmetic alone, so that
// thousands of layouts are weighed in no time; no schedule is recorded. There are no model::Layers
// to count either, so FLOPs and buffers come from sums over layers. A test compares them with those
// of whole plans (tests/unit/train_layouts.cc).
#pragma once

#include <cstdint>

#include "cost/rank_layout.h"

namespace ferry::cost {

// The arithmetic's seconds of recorded steps over those that they took: the least and the most of
// them (bench/results/layouts.json). CPU ranks that share tensors or layers over a slow network are
// among them. Where such ranks share a host, and no network binds, it errs more
// (layouts_16_cores.json).
inline constexpr double kArithmeticLeast = 0.4983, kArithmeticMost = 1.2351;
// The same of GPUs alone, which shared none.
inline constexpr double kOfGpusLeast = 0.8844, kOfGpusMost = 1.2351;
// Two equally fast layouts may differ by this factor.
inline constexpr double kArithmeticErrs = kOfGpusMost / kOfGpusLeast;

// Bytes a second that reach one of so many ranks, of which its host has `here`: from those one
// after the other at the one rate, from all others at the other.
double mean_rate(int64_t ranks, int64_t here, double inside_host, double outside);

// What a stage waits where all are as fast, in visits of a block by a micro-batch. Groups of
// `group_size` pass through virtual stages of so many blocks.
struct Passing {
    Order order = Order::one_f_one_b;
    int64_t stages = 1, groups = 1, group_size = 1, virtual_stages = 1, blocks = 1;
    double visits() const {
        return static_cast<double>(groups * group_size * virtual_stages * blocks);
    }
};
double waiting_visits(const Passing& of);

// What a step takes in this layout, and the memory of it; `fits`: whether there is as much.
struct Weighed {
    Layout layout{};
    bool fits = false;
};
Weighed weigh(const ModelSizes& model, const Cluster& cluster, Layout layout);

}  // namespace ferry::cost
