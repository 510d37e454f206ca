#include "train/prediction/config_facts.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <optional>

#include "cost/rank_layout.h"
#include "cost/traffic.h"
#include "data/tokens.h"
#include "ferry/config.h"
#include "model/model.h"
#include "topology/topology.h"
#include "train/setup/from_config.h"
#include "train/setup/loader_of.h"
#include "train/setup/model_of.h"
#include "train/stack/threads.h"

namespace ferry::train {

bool check_token_header(const Config& config) {
    if (::access(config.data.tokens.c_str(), F_OK) != 0 && errno == ENOENT) return false;
    const TokenFileInfo tokens = read_token_info(config.data.tokens);
    const model::Description made = model_of(config);
    split_tokens(loader_options(config, made.shape, true), tokens);
    check_vocabulary(config, made, tokens);
    return true;
}

std::optional<PatternShare> pattern_share(const Config& config) {
    const model::Shape shape = model_of(config).shape;
    if (shape.patterns.empty()) return std::nullopt;
    const int64_t sequence = config.batch.sequence;
    const double causal = static_cast<double>(sequence) * static_cast<double>(sequence + 1) / 2;
    PatternShare share{.name = shape.pattern_text.substr(0, shape.pattern_text.find(' ')),
                       .pairs = 0,
                       .blocks = 0};
    for (const auto& lists : shape.patterns) {
        if (!lists) continue;
        if (!share.lists) share.lists = lists;
        share.block = lists->block;
        share.layouts = lists->layouts;
        share.layers += 1;
        share.pairs += lists->visible_pairs(sequence) / (causal * lists->layouts);
        share.blocks += static_cast<double>(lists->visible_blocks()) /
                        static_cast<double>(lists->causal_blocks());
    }
    share.pairs /= static_cast<double>(std::max<int64_t>(1, share.layers));
    share.blocks /= static_cast<double>(std::max<int64_t>(1, share.layers));
    return share;
}

namespace {

// Of a block, to what ranks that share tensors divide, or all have.
void count(cost::LayerElements& into, const model::Tensor& tensor) {
    switch (tensor.role) {
        case model::Role::key:
        case model::Role::value:
        case model::Role::key_bias:
        case model::Role::value_bias:
            into.of_keys += tensor.count;
            return;
        case model::Role::query:
        case model::Role::query_bias:
        case model::Role::query_key_value:
        case model::Role::query_key_value_bias:
        case model::Role::output:
            into.of_queries += tensor.count;
            return;
        case model::Role::attention_norm:
        case model::Role::attention_norm_bias:
        case model::Role::mlp_norm:
        case model::Role::mlp_norm_bias:
        case model::Role::query_norm:
        case model::Role::key_norm:
        case model::Role::output_bias:
        case model::Role::down_bias:
            into.whole += tensor.count;
            return;
        default:
            into.inner += tensor.count;
    }
}

}  // namespace

cost::ModelSizes model_sizes(const Config& config) {
    const model::Shape shape = model_of(config).shape;
    const auto layers = model::layers_of(shape, {}, false);
    const model::Numerics numerics = numerics_of(config, shape);
    cost::ModelSizes found{
        .hidden = shape.hidden,
        .blocks = shape.layers,
        .heads = shape.heads,
        .kv_heads = shape.kv_heads,
        .head_dim = shape.head_dim,
        .intermediate = shape.intermediate,
        .mlp_columns = (shape.gated ? 3 : 2) * shape.intermediate,
        .has_patterns = !shape.patterns.empty(),
        .vocab = shape.vocab,
        .tied = shape.tie_embeddings,
        .sequence = config.batch.sequence,
        .sequences = config.batch.micro_batches * config.batch.micro_batch,
        .residual = size_of(numerics.residual),
        .element = cost::element_bytes(format_of(config), numerics.compute, numerics.wire)};
    for (const model::Tensor& tensor : layers[1].tensors) count(found.block, tensor);
    for (const model::Tensor& tensor : layers.front().tensors)
        if (tensor.role != model::Role::token_table) found.embedding_whole += tensor.count;
    for (const model::Tensor& tensor : layers.back().tensors)
        if (tensor.role != model::Role::head_table) found.head_whole += tensor.count;
    for (const model::Layer& layer : layers) {
        if (layer.kind != model::LayerKind::block) continue;
        // Two products, each of two operations a key and element.
        found.attention_flops += 4 * cost::keys_seen(shape, config.batch.sequence, layer.index) *
                                 static_cast<double>(shape.heads * shape.head_dim) /
                                 static_cast<double>(shape.layers);
    }
    return found;
}

void check_reserved_cores(const Config& config) { require_a_core(machine_for(config)); }

}  // namespace ferry::train
