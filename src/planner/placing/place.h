// Where everything goes, given what stays from forward to backward: the planner's policy.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "placement.h"

namespace ferry::planner {

// How many blocks save this, as the user asks. None: the planner decides.
std::optional<int64_t> blocks_asked_to_save(const PlanRequest& request, model::Saved what);

// The activations that stay on the device from forward to backward. First the inputs of at most so
// many blocks, the last ones, as far as they fit. Then these saved activations in their order: all
// that the configuration asks for, and as many of the others as fit.
struct ToSave {
    int64_t inputs = 0;
    std::span<const SavedActivation> activations{};
};
// How often a placement can give up device buffers that only keep the lanes busy. Each time it
// gives up more, so that what the host has no room for stays on the device.
inline constexpr size_t kMostYielded = 5;
// Throws does_not_fit naming the tier, the bytes missing and the smallest budget that works.
Placement place(const PlanRequest& request, const Workload& work, const std::vector<Chunk>& chunks,
                const std::vector<AccumulatorSpill>& spills, const cost::Measurements& machine,
                const ToSave& to_save, size_t yielded = 0);
}  // namespace ferry::planner
