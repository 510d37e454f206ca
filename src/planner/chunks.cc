#include "chunks.h"

#include <algorithm>

namespace ferry::planner {

std::vector<Chunk> cut_chunks(const std::vector<model::Layer>& layers, int64_t chunk_elements,
                              std::vector<LayerPlan>& layer_plans) {
    std::vector<Chunk> chunks;
    int64_t leaf = 0;
    for (size_t l = 0; l < layers.size(); ++l) {
        layer_plans[l].first_chunk = static_cast<int64_t>(chunks.size());
        for (const model::Segment& segment : layers[l].segments) {
            for (int64_t first = 0; first < segment.count; first += chunk_elements) {
                Chunk chunk{.layer = static_cast<int64_t>(l),
                            .first = segment.offset + first,
                            .count = std::min(chunk_elements, segment.count - first),
                            .trainable = segment.trainable,
                            .decays = segment.decays};
                if (chunk.trainable) {
                    chunk.first_leaf = leaf;
                    leaf += chunk.count / kLeafElements;
                }
                chunks.push_back(chunk);
            }
        }
        layer_plans[l].chunks = static_cast<int64_t>(chunks.size()) - layer_plans[l].first_chunk;
    }
    return chunks;
}

int64_t largest_segment(const std::vector<model::Layer>& layers) {
    int64_t largest = kLeafElements;
    for (const model::Layer& layer : layers) {
        for (const model::Segment& segment : layer.segments) {
            largest = std::max(largest, segment.count);
        }
    }
    return largest;
}

int64_t choose_chunk_elements(const std::vector<model::Layer>& layers, const Config& config) {
    const int64_t largest = largest_segment(layers);
    // Large enough for a disk's bandwidth (12 MiB of state), small enough to stay in the caches.
    // Beside a GPU and without a disk there are many cores, all waiting for memory: what counts is
    // how often they meet. Updates of 2.9 B parameters by 16 cores took 0.75 s in chunks of 1 Mi
    // elements, 0.46 s in chunks of 8 Mi.
    const bool many_cores = config.device == "cuda" && config.budgets.nvme.empty();
    int64_t elements = many_cores ? 8 * kMiB : kMiB;
    constexpr int64_t kStagedBytes =
        6 * int64_t{12 + 4 + 4};  // per element: pieces of state (at most), weight, gradient
    while (elements > kLeafElements &&
           (elements / 2 >= largest || elements * kStagedBytes > config.budgets.host_bytes / 4)) {
        elements /= 2;
    }
    return elements;
}

}  // namespace ferry::planner
