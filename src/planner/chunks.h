// Cutting layers into chunks.
#pragma once

#include <vector>

#include "ferry/planner.h"

namespace ferry::planner {

constexpr int64_t kLeafElements = 4096;

// Chunks of every layer in order, none across a segment's end; fills LayerPlan's chunk ranges.
std::vector<Chunk> cut_chunks(const std::vector<model::Layer>& layers, int64_t chunk_elements,
                              std::vector<LayerPlan>& layer_plans);

// Elements; a larger chunk would be air.
int64_t largest_segment(const std::vector<model::Layer>& layers);

// A power of two such that a few staged chunks take a small part of the host budget.
int64_t choose_chunk_elements(const std::vector<model::Layer>& layers, const Config& config);

}  // namespace ferry::planner
