#include "cost/traffic.h"

#include <algorithm>

namespace ferry::cost {

ElementBytes element_bytes(const StateFormat& state, DType compute, DType wire) {
    return {.state = state.element_bytes(),
            .wire = size_of(wire),
            .weight = size_of(compute),
            .split = state.split};
}

WeightTraffic weight_traffic(const std::vector<model::Layer>& layers, const model::Shape& shape,
                             int64_t step_tokens, DType type, const zero::Partition& partition) {
    WeightTraffic found;
    const auto bytes_of = [type](int64_t elements) { return double(elements * size_of(type)); };
    bool trains_below = false;
    for (const model::Layer& layer : layers) {
        if (layer.elements == 0) continue;  // another stage's
        const double bytes = bytes_of(layer.elements);
        const bool trains = layer.trainable_elements > 0;
        found.bytes += bytes;
        found.frozen_bytes += bytes_of(layer.elements - layer.trainable_elements);
        const double from_others =
            partition.shares_updates()
                ? static_cast<double>(zero::gathered_bytes(partition, layer, type))
                : 0;
        if (layer.kind == model::LayerKind::embedding) {
            const double rows = bytes_of(std::min(step_tokens, shape.vocab) * shape.hidden);
            found.read_bytes += std::max(0.0, rows - from_others);
            if (shape.tie_embeddings) found.read_bytes += bytes;
        } else {
            const bool backward = layer.kind == model::LayerKind::block && (trains || trains_below);
            found.read_bytes += bytes * (backward ? 2 : 1) - from_others;
        }
        trains_below = trains_below || trains;
    }
    return found;
}

namespace {

// That reach a rank for an update of a shard.
int64_t update_traffic(const zero::Partition& partition, int64_t shard, DType wire,
                       zero::Exchanged what) {
    const auto from_others = [&](int64_t part) { return zero::exchanged_bytes(partition, part); };
    switch (what) {
        case zero::Exchanged::nothing:
            return 0;
        case zero::Exchanged::momentum:  // to the owner and back
            return 2 * from_others(partition.codecs.momentum.bytes(shard));
        case zero::Exchanged::gradients:
            break;
    }
    const int64_t bytes = from_others(partition.part_bytes(shard, wire));
    // Where all ranks update everything the sums come back to them.
    return bytes + (partition.sharding.state ? 0 : from_others(shard * size_of(wire)));
}

}  // namespace

double comm_traffic(const std::vector<model::Layer>& layers, const zero::Partition& partition,
                    DType compute, DType wire, zero::Exchanged what) {
    if (partition.alone()) return 0;
    int64_t bytes = 0;
    bool trains_below = false;
    for (const model::Layer& layer : layers) {
        const bool trains = layer.trainable_elements > 0;
        const bool backward = layer.kind == model::LayerKind::block && (trains || trains_below);
        const int64_t gathered = zero::gathered_bytes(partition, layer, compute);
        if (partition.sharding.weights) bytes += gathered * (backward ? 2 : 1);
        if (partition.shares_updates()) bytes += gathered;
        bytes += update_traffic(partition, layer.trainable_elements / partition.ranks, wire, what);
        trains_below = trains_below || trains;
    }
    return static_cast<double>(bytes);
}

double keys_seen(const model::Shape& shape, int64_t sequence, int64_t block) {
    if (const ops::BlockLists* pattern = shape.pattern_of(block)) {
        const int64_t window = shape.window_of(block);
        return pattern->visible_pairs(sequence, window < sequence ? window : 0) /
               (double(sequence) * pattern->layouts);
    }
    const double s = double(sequence), window = double(shape.window_of(block));
    const double w = window > 0 ? std::min(window, s) : s;
    return w - w * w / (2 * s);
}

double model_flops(const std::vector<model::Layer>& layers, const model::Shape& shape,
                   int64_t sequence, int64_t step_tokens) {
    double per_token = 0;
    bool trains_below = false;
    for (const model::Layer& layer : layers) {
        const bool trains = layer.trainable_elements > 0;
        const double passes = trains || trains_below ? 4 : 2;  // forward, and its input's gradient
        for (const model::Tensor& t : layer.tensors) {
            const bool multiplies = t.shape.size() > 1 && layer.kind != model::LayerKind::embedding;
            if (multiplies) per_token += double(t.count) * (passes + (t.trainable ? 2 : 0));
        }
        if (layer.kind == model::LayerKind::head && layer.elements > 0 && shape.tie_embeddings) {
            const double table = double(shape.vocab * shape.hidden);
            per_token +=
                table *
                (passes + (layers.front().find(model::Role::token_table)->trainable ? 2 : 0));
        }
        if (layer.kind == model::LayerKind::block && layer.elements > 0) {
            const double keys = keys_seen(shape, sequence, layer.index);
            // Two products forward, four backward, each of 2 operations a key and element.
            per_token += (passes > 2 ? 12 : 4) * keys * double(shape.heads * shape.head_dim);
        }
        trains_below = trains_below || trains;
    }
    return per_token * double(step_tokens);
}

}  // namespace ferry::cost
