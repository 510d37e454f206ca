#include "buffer_sizes.h"

#include <algorithm>

#include "model/gradients.h"

namespace ferry::planner {
namespace {

// The largest layer among the blocks, or among the embedding and the head.
template <class Bytes>
int64_t largest(const Workload& work, bool blocks, const Bytes& bytes_of) {
    int64_t bytes = 0;
    for (const model::Layer& layer : work.layers) {
        if ((layer.kind == model::LayerKind::block) == blocks)
            bytes = std::max(bytes, bytes_of(layer));
    }
    return bytes;
}

// Of what is cut into chunks of so many elements.
int64_t chunk_bytes(Class c, const Workload& work, int64_t elements) {
    switch (c) {
        case Class::state_staging:
            // Gradients are read back through it too.
            return std::max(largest_state_bytes(elements, work.state),
                            elements * size_of(work.numerics.wire));
        case Class::weight_staging:
            return elements * size_of(work.numerics.compute);
        case Class::gradient_staging:
            return elements * size_of(work.numerics.wire);
        case Class::feedback_staging:  // kept gradients pass through it too
            return zero::feedback_bytes(elements, work.partition.ranks,
                                        work.partition.codecs.local_steps);
        default:
            bug("no part of a chunk");
    }
}

// Of the largest chunk.
int64_t largest_part(Class c, const Workload& work) {
    const int64_t bytes = chunk_bytes(c, work, work.cut_elements), most = work.matrices.elements;
    if (most == 0) return bytes;
    const int64_t of_matrix =
        c == Class::state_staging
            ? std::max(work.matrices.state_bytes, most * size_of(work.numerics.wire))
            : chunk_bytes(c, work, most);
    return std::max(bytes, of_matrix);
}

int64_t largest_second_shard(const Workload& work) {
    const auto most = [&](const model::Layer& layer) {
        int64_t bytes = 0;
        for (const zero::ByteRun& run :
             zero::second_shards(work.partition, layer, work.numerics.compute))
            bytes = std::max(bytes, run.bytes);
        return bytes;
    };
    return std::max(largest(work, true, most), largest(work, false, most));
}

int64_t exact_bytes(Class c, const Workload& work) {
    const int64_t elements = work.chunk_elements;
    const int64_t weight = size_of(work.numerics.compute), wire = size_of(work.numerics.wire);
    const auto weights = [&](const model::Layer& layer) { return layer.elements * weight; };
    const auto gradient = [](const model::Layer& layer) { return layer.trainable_elements * 4; };
    switch (c) {
        case Class::block_weights:
            return largest(work, true, weights);
        case Class::edge_weights:
            return largest(work, false, weights);
        case Class::block_gradient:
            return largest(work, true, gradient);
        case Class::edge_gradient:
            return largest(work, false, gradient);
        case Class::wire:
            return elements * wire + elements / kLeafElements * 4;
        case Class::parts: {
            // Sums come back uncoded to where every rank updates everything.
            const int64_t part = work.partition.part_bytes(elements, work.numerics.wire);
            const int64_t sum = work.partition.sharding.state ? 0 : elements * wire;
            return work.partition.ranks * std::max(part, sum);
        }
        case Class::codes: {
            const auto codes = [&](const model::Layer& layer) {
                return zero::coded_bytes(work.partition.codecs.weights, layer,
                                         work.partition.ranks);
            };
            return std::max(largest(work, true, codes), largest(work, false, codes));
        }
        case Class::activation:
        case Class::input_staging:
            return work.needs.activation;
        case Class::attention:
            return work.needs.saved[at(model::Saved::attention)];
        case Class::mlp:
            return work.needs.saved[at(model::Saved::mlp)];
        case Class::projections:
            return work.needs.saved[at(model::Saved::projections)];
        case Class::deferred:
            return work.needs.deferred;
        case Class::norms:
            return largest(work, true,
                           [](const model::Layer& l) { return model::norm_elements(l) * 4; });
        case Class::tokens:
        case Class::host_tokens:
            return work.numerics.token_numbers() * int64_t{sizeof(int32_t)};
        case Class::lists:
            return work.needs.lists;
        case Class::scratch:
            return work.needs.scratch;
        case Class::report:
            return work.report_bytes;
        case Class::state_staging:
        case Class::weight_staging:
        case Class::gradient_staging:
        case Class::feedback_staging:
            return largest_part(c, work);
        case Class::spill_staging:
            return work.cut_elements * 4;
        case Class::codes_staging:
            return work.partition.ranks * work.partition.codecs.momentum.bytes(elements);
        case Class::second_staging:
            return largest_second_shard(work);
    }
    bug("unknown buffer class");
}

}  // namespace

int64_t buffer_bytes(Class c, const Workload& work) {
    return round_up(exact_bytes(c, work), kPage);
}

SlotFamily slots_of(const Chunk& chunk, Class staging, const Workload& work) {
    auto [kind, name] = staging == Class::state_staging    ? RowName{RowKind::state, "state"}
                        : staging == Class::weight_staging ? RowName{RowKind::weights, "weights"}
                        : staging == Class::feedback_staging
                            ? RowName{RowKind::momentum, "momentum and its errors"}
                            : RowName{RowKind::gradients, "gradients"};
    if (!is_matrix(chunk))
        return {kind, name, round_up(chunk_bytes(staging, work, work.cut_elements), kPage)};
    const bool padded = chunk.count - chunk.rows * chunk.cols >= cost::kLeafElements;
    name += padded ? " of a matrix in " + std::to_string(chunk.count)
                   : " of " + std::to_string(chunk.rows) + " x " + std::to_string(chunk.cols);
    if (chunk.format.moment_type != work.state.moment_type) name += ", fp32 moments";
    const int64_t bytes = staging == Class::state_staging ? chunk.format.bytes(chunk.count)
                                                          : chunk_bytes(staging, work, chunk.count);
    return {kind, name, round_up(bytes, kPage)};
}

SlotFamily slots_of_kept(const Workload& work) {
    const int64_t bytes = work.partition.ranks * work.cut_elements * size_of(work.numerics.wire);
    return {RowKind::gradients, "gradients until the outcome", round_up(bytes, kPage)};
}

const char* name_of(Class c) {
    static constexpr const char* kNames[kClasses] = {"block weights",
                                                     "edge weights",
                                                     "block gradient",
                                                     "edge gradient",
                                                     "wire",
                                                     "ranks' parts",
                                                     "weight codes",
                                                     "activation",
                                                     "attention",
                                                     "mlp",
                                                     "projections",
                                                     "weights' gradients to come",
                                                     "norms' gradients",
                                                     "tokens",
                                                     "block lists",
                                                     "scratch",
                                                     "report",
                                                     "state staging",
                                                     "weight staging",
                                                     "gradient staging",
                                                     "input staging",
                                                     "spill staging",
                                                     "momentum staging",
                                                     "momentum's codes",
                                                     "second shards' staging",
                                                     "host tokens"};
    return kNames[at(c)];
}

RowName row_of(Class c) {
    switch (c) {
        case Class::block_weights:
        case Class::edge_weights:
            return {RowKind::weights_in_flight, "weights in flight"};
        case Class::block_gradient:
        case Class::edge_gradient:
            return {RowKind::accumulators, "gradient accumulators"};
        case Class::activation:
            return {RowKind::block_inputs, "block inputs"};
        case Class::attention:
            return {RowKind::saved_attention, "attention saved for backward"};
        case Class::mlp:
            return {RowKind::saved_mlp, "MLPs' products saved for backward"};
        case Class::projections:
            return {RowKind::saved_projections, "attention's products saved for backward"};
        case Class::deferred:
        case Class::norms:
            return {RowKind::deferred, "kept for weights' gradients"};
        case Class::lists:
            return {RowKind::block_lists, "attention's lists of blocks"};
        case Class::scratch:
            return {RowKind::scratch, "scratch of the kernels"};
        default:
            return {RowKind::transfers, "tokens, gradients, report on their way"};
    }
}

}  // namespace ferry::planner
