// How large a buffer of each class is for a given model and chunk size.
#pragma once

#include "chunks.h"
#include "planner/planner.h"
#include "zero/feedback.h"

namespace ferry::planner {

constexpr size_t at(Class c) { return static_cast<size_t>(c); }

struct Workload {
    const std::vector<model::Layer>& layers;
    const model::Numerics& numerics;
    const DeviceNeeds& needs;
    const zero::Partition& partition;
    int64_t chunk_elements = 0;  // of the largest chunk
    int64_t cut_elements = 0;    // what others than Muon's matrices are cut into
    MatrixNeeds matrices{};
    int64_t report_bytes = 0;  // one step's report
    StateFormat state{};
    int64_t ns_steps = 0;
    DType ns_products = DType::f32;
    bool sends_matrices = false;  // to a GPU, which orthogonalises them
    // Bytes of the host's workspace for one matrix: all of it, or what is sent to a GPU. The second
    // function: bytes of a GPU's room.
    int64_t matrix_workspace() const {
        return sends_matrices ? matrices.elements * 4 : matrices.workspace_bytes;
    }
    int64_t matrix_room() const {
        return sends_matrices && matrices.elements > 0
                   ? round_up(matrices.workspace_bytes + needs.matrix_scratch, kPage)
                   : 0;
    }
};

// Bytes in the host arena of the norm leaves and, behind them, the report.
inline int64_t report_room(int64_t leaves, int64_t report_bytes) {
    return round_up(leaves * 4, 8) + report_bytes;
}
// A family of slots on NVMe, for one kind of a chunk's bytes. What is cut into chunks has one.
// Muon's matrices of one shape have another; with several ranks, those in shards of one size.
struct SlotFamily {
    RowKind kind{};
    std::string name{};
    int64_t bytes = 0;
};
SlotFamily slots_of(const Chunk& chunk, Class staging, const Workload& work);
// The family of gradients that wait for the outcome. They pass through momentum's staging.
SlotFamily slots_of_kept(const Workload& work);

// Bytes of one buffer, a multiple of the page.
int64_t buffer_bytes(Class c, const Workload& work);
const char* name_of(Class c);
RowName row_of(Class c);  // the line of the plan's table that counts such buffers

}  // namespace ferry::planner
