#include "chunks.h"

#include <algorithm>

namespace ferry::planner {

namespace {

// body(first, count) for runs of at most `most` elements.
template <class Body>
void cut(const zero::Run& run, int64_t most, const Body& body) {
    for (int64_t at = 0; at < run.count; at += most)
        body(run.first + at, std::min(most, run.count - at));
}

}  // namespace

StateFormat format_of(const StateFormat& asked, const model::Segment& segment) {
    StateFormat format = asked;
    if (segment.fp32_moments) format.moment_type = MomentType::f32;
    if (segment.has_matrices()) format.moments = 1;
    return format;
}

int64_t elements_of_chunk(int64_t chunk_elements, const StateFormat& asked,
                          const StateFormat& format) {
    if (format == asked) return chunk_elements;
    const int64_t fitting =
        asked.bytes(chunk_elements) / format.bytes(kLeafElements) * kLeafElements;
    return std::clamp(fitting, kLeafElements, chunk_elements);
}

int64_t largest_state_bytes(int64_t chunk_elements, const StateFormat& asked) {
    const int64_t bytes = asked.bytes(chunk_elements);
    if (asked.moment_type != MomentType::int8) return bytes;
    const StateFormat fp32 = format_of(asked, {.fp32_moments = true});
    return std::max(bytes, fp32.bytes(elements_of_chunk(chunk_elements, asked, fp32)));
}

std::vector<Chunk> cut_chunks(const std::vector<model::Layer>& layers, int64_t chunk_elements,
                              const StateFormat& state, const zero::Partition& partition,
                              std::vector<LayerPlan>& layer_plans) {
    std::vector<Chunk> chunks;
    int64_t leaf = 0;
    const auto add = [&](size_t l, const model::Segment& segment, int owner) {
        const bool mine = owner == partition.rank;
        if (!mine && partition.sharding.weights) return;
        const bool updates = segment.trainable && (mine || !partition.sharding.state) &&
                             partition.stage.has(static_cast<int64_t>(l));
        const StateFormat format = format_of(state, segment);
        const bool whole = segment.has_matrices();
        const model::MatrixShape shape =
            whole ? segment.matrices[static_cast<size_t>(owner)] : model::MatrixShape{0, 0};
        const int64_t most = whole ? partition.shard_elements(segment)
                                   : elements_of_chunk(chunk_elements, state, format);
        cut(partition.shard(segment, owner), most, [&](int64_t first, int64_t count) {
            chunks.push_back({.layer = static_cast<int64_t>(l),
                              .first = first,
                              .count = count,
                              .trainable = updates,
                              .decays = segment.decays,
                              .owner = owner,
                              .replica = segment.trainable && !updates,
                              .format = format,
                              .rows = shape.rows,
                              .cols = shape.cols});
            if (!mine || !updates) return;
            chunks.back().first_leaf = leaf;
            leaf += count / kLeafElements;
        });
    };
    for (size_t l = 0; l < layers.size(); ++l) {
        layer_plans[l].first_chunk = std::ssize(chunks);
        for (const model::Segment& segment : layers[l].segments) {
            for (int owner = 0; owner < partition.ranks; ++owner) add(l, segment, owner);
        }
        layer_plans[l].chunks = std::ssize(chunks) - layer_plans[l].first_chunk;
    }
    return chunks;
}

std::vector<AccumulatorSpill> cut_spills(const std::vector<model::Layer>& layers,
                                         int64_t chunk_elements,
                                         std::vector<LayerPlan>& layer_plans) {
    std::vector<AccumulatorSpill> spills;
    for (size_t l = 0; l < layers.size(); ++l) {
        layer_plans[l].first_spill = std::ssize(spills);
        for (const model::Segment& segment : layers[l].segments) {
            if (!segment.trainable) continue;
            cut({segment.offset, segment.count}, chunk_elements, [&](int64_t first, int64_t count) {
                spills.push_back({static_cast<int64_t>(l), first, count});
            });
        }
        layer_plans[l].spills = std::ssize(spills) - layer_plans[l].first_spill;
    }
    return spills;
}

MatrixNeeds matrix_needs(const std::vector<model::Layer>& layers, const StateFormat& asked,
                         DType products) {
    MatrixNeeds most;
    for (const model::Layer& layer : layers) {
        for (const model::Segment& s : layer.segments) {
            const int64_t count = s.has_matrices() ? s.count / std::ssize(s.matrices) : 0;
            most.elements = std::max(most.elements, count);
            for (const auto& [rows, cols] : s.matrices) {
                most.state_bytes = std::max(most.state_bytes, format_of(asked, s).bytes(count));
                most.workspace_bytes = std::max(most.workspace_bytes,
                                                workspace_of(rows, cols, count, products).bytes());
            }
        }
    }
    return most;
}

int64_t leaves_of(const std::vector<Chunk>& chunks, const zero::Partition& partition) {
    int64_t leaves = 0;
    for (const Chunk& chunk : chunks) {
        if (chunk.trainable && chunk.owner == partition.rank) leaves += chunk.count / kLeafElements;
    }
    return leaves;
}

int64_t largest_shard(const std::vector<model::Layer>& layers, const zero::Partition& partition) {
    int64_t largest = kLeafElements;
    for (const model::Layer& layer : layers) {
        for (const model::Segment& segment : layer.segments)
            largest = std::max(largest, partition.shard_elements(segment));
    }
    return largest;
}

int64_t choose_chunk_elements(const std::vector<model::Layer>& layers, const PlanRequest& request,
                              const zero::Partition& partition, const cost::Measurements& machine,
                              int64_t update_bytes) {
    constexpr double kOverheads = 16;  // an update's length: 6 % are lost at most
    constexpr int64_t kMost = 16 * kMiB;
    const int64_t largest = largest_shard(layers, partition);
    // Large enough for a disk's bandwidth (12 MiB of state), small enough to stay in the caches.
    int64_t elements = kMiB;
    // Without a disk to wait for, what counts is how often the threads meet. On 16 cores chunks of
    // 8 Mi elements took three fifths of the time of chunks of 1 Mi.
    const double enough = kOverheads * machine.update_overhead_s * machine.dram_bytes_per_s /
                          static_cast<double>(update_bytes);
    while (request.budgets.nvme.empty() && elements < kMost &&
           2 * static_cast<double>(elements) <= enough) {
        elements *= 2;
    }
    constexpr int64_t kStagedBytes =
        6 * int64_t{12 + 4 + 4};  // per element: parts of state (at most), weight, gradient
    while (elements > kLeafElements &&
           (elements / 2 >= largest || elements * kStagedBytes > request.budgets.host_bytes / 4)) {
        elements /= 2;
    }
    return elements;
}

}  // namespace ferry::planner
