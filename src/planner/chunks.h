// Cutting layers into chunks.
#pragma once

#include <vector>

#include "cost/operations.h"
#include "planner/planner.h"

namespace ferry::planner {

using cost::kLeafElements;

// Elements of a chunk of that format that fit into a slot of the other chunks. At least one leaf.
int64_t elements_of_chunk(int64_t chunk_elements, const StateFormat& asked,
                          const StateFormat& format);
// Bytes of the largest chunk's state.
int64_t largest_state_bytes(int64_t chunk_elements, const StateFormat& asked);

// The chunks that a rank keeps something of, layer by layer. None crosses the end of a shard. Also
// fills LayerPlan's chunk ranges.
std::vector<Chunk> cut_chunks(const std::vector<model::Layer>& layers, int64_t chunk_elements,
                              const StateFormat& state, const zero::Partition& partition,
                              std::vector<LayerPlan>& layer_plans);
// The same of the accumulators of what trains, on any rank.
std::vector<AccumulatorSpill> cut_spills(const std::vector<model::Layer>& layers,
                                         int64_t chunk_elements,
                                         std::vector<LayerPlan>& layer_plans);

// Of Muon's matrices, each of which is one chunk.
struct MatrixNeeds {
    int64_t elements = 0, state_bytes = 0;
    int64_t workspace_bytes = 0;  // to orthogonalise it, on the device
};
// The most of each that any of the matrices needs. All are 0 without Muon. `products`: the type of
// Newton-Schulz's factors.
MatrixNeeds matrix_needs(const std::vector<model::Layer>& layers, const StateFormat& asked,
                         DType products);

// Norm leaves of this rank's shards.
int64_t leaves_of(const std::vector<Chunk>& chunks, const zero::Partition& partition);

// Elements of the largest shard. Nothing would fill a larger chunk.
int64_t largest_shard(const std::vector<model::Layer>& layers, const zero::Partition& partition);

// A power of two such that a few staged chunks take a small part of the host budget. An element's
// update moves `update_bytes`.
int64_t choose_chunk_elements(const std::vector<model::Layer>& layers, const PlanRequest& request,
                              const zero::Partition& partition, const cost::Measurements& machine,
                              int64_t update_bytes);

}  // namespace ferry::planner
