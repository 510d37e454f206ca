#include "cost/traffic.h"

#include <algorithm>

#include "ferry/error.h"
#include "ferry/units.h"
#include "model/gradients.h"

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
    const zero::Stage& stage = partition.stage;
    bool trains_below = stage.trains_below;
    for (size_t l = 0; l < layers.size(); ++l) {
        const model::Layer& layer = layers[l];
        if (layer.elements == 0) continue;  // another stage's
        trains_below = trains_below || stage.trains_before(static_cast<int64_t>(l));
        const double bytes = bytes_of(layer.elements);
        // What later visits gather in the host came from all ranks at the first.
        const bool again = !partition.keeps_second_shards();
        const bool trains = layer.trainable_elements > 0;
        found.bytes += bytes;
        found.frozen_bytes += bytes_of(layer.elements - layer.trainable_elements);
        const double from_others =
            partition.shares_updates()
                ? static_cast<double>(zero::gathered_bytes(partition, layer, type))
                : 0;
        if (layer.kind == model::LayerKind::embedding && stage.copies_table()) {
            if (!trains) found.read_bytes += bytes;
        } else if (layer.kind == model::LayerKind::embedding) {
            const int64_t tokens = std::min(step_tokens, shape.vocab);
            const double rows =
                bytes_of(ceil_div(tokens, int64_t{partition.slices}) * shape.hidden);
            found.read_bytes += std::max(0.0, rows - from_others);
            if (shape.tie_embeddings && stage.all() && again) found.read_bytes += bytes;
        } else {
            const bool backward = layer.kind == model::LayerKind::block && (trains || trains_below);
            found.read_bytes += bytes * (backward && again ? 2 : 1) - from_others;
        }
        trains_below = trains_below || trains;
    }
    return found;
}

namespace {

// That reach a rank for an update of a shard.
CommTraffic update_traffic(const zero::Partition& partition, int64_t shard, DType wire,
                           zero::Exchanged what) {
    const auto from_others = [&](int64_t part) {
        return static_cast<double>(zero::exchanged_bytes(partition, part));
    };
    switch (what) {
        case zero::Exchanged::nothing:
            return {};
        case zero::Exchanged::momentum:  // to the owner and back
            return {.among_all = 2 * from_others(partition.codecs.momentum.bytes(shard))};
        case zero::Exchanged::gradients:
            break;
    }
    // Where all ranks update everything the sums come back to them.
    CommTraffic found{.among_all =
                          partition.sharding.state ? 0 : from_others(shard * size_of(wire))};
    const int64_t part = partition.part_bytes(shard, wire);
    if (partition.two_levels()) {
        found.in_host = static_cast<double>(zero::exchanged_in_host_bytes(partition, part));
        found.across_hosts = static_cast<double>(zero::exchanged_across_bytes(partition, part));
    } else {
        found.among_all += from_others(part);
    }
    return found;
}

}  // namespace

CommTraffic comm_traffic(const std::vector<model::Layer>& layers, const zero::Partition& partition,
                         DType compute, DType wire, zero::Exchanged what) {
    CommTraffic found;
    if (partition.alone()) return found;
    bool trains_below = partition.stage.trains_below;
    for (size_t l = 0; l < layers.size(); ++l) {
        const model::Layer& layer = layers[l];
        if (!partition.stage.has(static_cast<int64_t>(l))) continue;  // a table's copy
        trains_below = trains_below || partition.stage.trains_before(static_cast<int64_t>(l));
        const bool trains = layer.trainable_elements > 0;
        const bool backward = layer.kind == model::LayerKind::block && (trains || trains_below);
        const auto gathered = static_cast<double>(zero::gathered_bytes(partition, layer, compute));
        if (partition.sharding.weights || partition.shares_updates()) found.among_all += gathered;
        if (partition.sharding.weights && backward) {
            if (partition.keeps_second_shards())
                found.in_host +=
                    static_cast<double>(zero::gathered_in_host_bytes(partition, layer, compute));
            else
                found.among_all += gathered;
        }
        const CommTraffic update =
            update_traffic(partition, layer.trainable_elements / partition.ranks, wire, what);
        found.among_all += update.among_all;
        found.in_host += update.in_host;
        found.across_hosts += update.across_hosts;
        trains_below = trains_below || trains;
    }
    return found;
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

namespace {

bool multiplies(const model::Tensor& tensor) { return tensor.shape.size() > 1; }
double once(const model::Tensor& tensor) { return 2 * static_cast<double>(tensor.count); }

bool has_input_gradient(model::Role matrix, const model::InputGradients& asked) {
    switch (matrix) {
        case model::Role::down:
            return asked.down;
        case model::Role::gate:
        case model::Role::up:
            return asked.up;
        case model::Role::output:
            return asked.output;
        default:
            return asked.qkv;
    }
}

LayerFlops block_flops(const model::Layer& layer, bool needs_dx) {
    LayerFlops found;
    const model::InputGradients asked = model::input_gradients_of(layer, needs_dx);
    const bool goes_back = needs_dx || layer.trainable_elements > 0;
    for (const model::Tensor& matrix : layer.tensors) {
        if (!multiplies(matrix)) continue;
        const double flops = once(matrix);
        found.forward += flops;
        // Of the last product the next block's forward alone reads what it gives.
        if (goes_back && matrix.role != model::Role::down) found.again += flops;
        found.gradients +=
            (has_input_gradient(matrix.role, asked) ? flops : 0) + (matrix.trainable ? flops : 0);
        found.weights += matrix.trainable ? flops : 0;
    }
    found.through_attention = asked.output;
    return found;
}

LayerFlops head_flops(const model::Layer& layer, const model::Layer* table, bool needs_dx) {
    const model::Tensor* matrix =
        table ? table->find(model::Role::token_table) : layer.find(model::Role::head_table);
    if (layer.elements == 0 || matrix == nullptr) return {};  // another stage's
    const bool norm_trains = std::ranges::any_of(
        layer.tensors, [](const model::Tensor& t) { return !multiplies(t) && t.trainable; });
    const double flops = once(*matrix);
    return {.forward = flops,
            .gradients = (needs_dx || norm_trains ? flops : 0) + (matrix->trainable ? flops : 0)};
}

}  // namespace

LayerFlops layer_flops(const model::Layer& layer, const model::Layer* table, bool needs_dx) {
    switch (layer.kind) {
        case model::LayerKind::embedding:
            return {};
        case model::LayerKind::block:
            return block_flops(layer, needs_dx);
        case model::LayerKind::head:
            return head_flops(layer, table, needs_dx);
    }
    bug("no such kind of layer");
}

double model_flops(const std::vector<model::Layer>& layers, const model::Shape& shape,
                   int64_t sequence, int64_t step_tokens) {
    const model::Layer* table = shape.tie_embeddings ? &layers.front() : nullptr;
    double per_token = 0;
    bool trains_below = false;
    for (const model::Layer& layer : layers) {
        const LayerFlops flops = layer_flops(layer, table, trains_below);
        per_token += flops.forward + flops.gradients;
        if (layer.kind == model::LayerKind::block && layer.elements > 0) {
            const double keys = keys_seen(shape, sequence, layer.index);
            per_token +=
                4 * keys * double(shape.heads * shape.head_dim) * (1 + flops.attention_passes());
        }
        trains_below = trains_below || layer.trainable_elements > 0;
    }
    return per_token * double(step_tokens);
}

}  // namespace ferry::cost
