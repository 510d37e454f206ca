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

MovedBytes moved_by(const HostUpdate& update) {
    const double read = update.reads_weight ? update.weight : 0;
    MovedBytes moved{.down = update.gradient};
    if (update.gradient_stored) moved.stored += 2 * update.gradient;
    if (update.state_stored) moved.stored += 2 * update.state;
    if (update.weight_stored) moved.stored += update.weight + read;
    if (update.weight_on_device) {
        moved.up += update.weight;
        moved.down += read;
    }
    return moved;
}

CommTraffic& CommTraffic::operator+=(const CommTraffic& more) {
    among_all += more.among_all;
    in_host += more.in_host;
    across_hosts += more.across_hosts;
    return *this;
}

namespace {

CommTraffic update_traffic(const zero::Partition& partition, const ShardBytes& shard,
                           zero::Exchanged what) {
    const auto from_others = [&](int64_t part) {
        return static_cast<double>(zero::exchanged_bytes(partition, part));
    };
    switch (what) {
        case zero::Exchanged::nothing:
            return {};
        case zero::Exchanged::momentum:  // to the owner and back
            return {.among_all = 2 * from_others(shard.part)};
        case zero::Exchanged::gradients:
            break;
    }
    // Where all ranks update everything the sums come back to them.
    CommTraffic found{.among_all = partition.sharding.state ? 0 : from_others(shard.sum)};
    if (partition.two_levels()) {
        found.in_host = static_cast<double>(zero::exchanged_in_host_bytes(partition, shard.part));
        found.across_hosts =
            static_cast<double>(zero::exchanged_across_bytes(partition, shard.part));
    } else {
        found.among_all += from_others(shard.part);
    }
    return found;
}

}  // namespace

SharedTraffic shared_traffic(const zero::Partition& partition, const ShardBytes& shard,
                             zero::Exchanged what) {
    SharedTraffic found{.update = update_traffic(partition, shard, what)};
    const bool shards_weights = partition.sharding.weights;
    const auto gathered = static_cast<double>(zero::exchanged_bytes(partition, shard.weights));
    if (shards_weights || partition.shares_updates()) found.weights.among_all = gathered;
    if (partition.keeps_second_shards())
        found.again.in_host =
            static_cast<double>(zero::exchanged_in_host_bytes(partition, shard.weights));
    else if (shards_weights)
        found.again.among_all = gathered;
    return found;
}

CommTraffic comm_traffic(const std::vector<model::Layer>& layers, const zero::Partition& partition,
                         DType compute, DType wire, zero::Exchanged what) {
    CommTraffic found;
    if (partition.alone()) return found;
    const auto part_bytes = [&](int64_t elements) {
        return what == zero::Exchanged::momentum ? partition.codecs.momentum.bytes(elements)
                                                 : partition.part_bytes(elements, wire);
    };
    bool trains_below = partition.stage.trains_below;
    for (size_t l = 0; l < layers.size(); ++l) {
        const model::Layer& layer = layers[l];
        if (!partition.stage.has(static_cast<int64_t>(l))) continue;  // a table's copy
        trains_below = trains_below || partition.stage.trains_before(static_cast<int64_t>(l));
        const bool trains = layer.trainable_elements > 0;
        const bool backward = layer.kind == model::LayerKind::block && (trains || trains_below);
        const int64_t shard = layer.trainable_elements / partition.ranks;
        const SharedTraffic its =
            shared_traffic(partition,
                           {.weights = zero::shard_bytes(partition, layer, compute),
                            .part = part_bytes(shard),
                            .sum = shard * size_of(wire)},
                           what);
        found += its.weights;
        if (backward) found += its.again;
        found += its.update;
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
