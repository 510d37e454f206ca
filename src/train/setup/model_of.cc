#include "model_of.h"

#include <spdlog/fmt/fmt.h>
#include <spdlog/fmt/ranges.h>

#include <algorithm>
#include <filesystem>
#include <set>

#include "attention_of.h"
#include "checkpoint/saved.h"
#include "ferry/error.h"
#include "ferry/learning_rate.h"
#include "ferry/optim.h"
#include "ops/patterns.h"
#include "train/setup/from_config.h"
#include "train/step/momentum_schedule.h"

namespace ferry::train {

namespace {

model::Description read_directory(const Config& config) {
    const ModelConfig& m = config.model;
    checkpoint::require_model_files(m.path);
    const std::string path = std::filesystem::path(m.path) / "config.json";
    model::Description found = model::read_description(read_text_file(path, kModelFile), path);
    if (found.drops && m.dropout != OnDoubt::ignore) {
        throw Error(Trouble::usage, {.what = "the model asks for dropout, which ferry does not do",
                                     .where = path,
                                     .remedy = "set model.dropout to \"ignore\""});
    }
    if (!m.load && found.shape.initial_deviation == 0) {
        throw Error(Trouble::usage,
                    {.what = "random weights would all be 0",
                     .where = path + ": initializer_range",
                     .measured = "0",
                     .remedy = "set it above 0, or start from the directory's weights"});
    }
    return found;
}

// Whether RoPE reaches as far as the model was made for, and no scaling says what lies beyond. What
// turns a part of each head stretches nothing by itself.
bool is_rope_unscaled(const model::Shape& shape) {
    using enum model::RopeScaling::Kind;
    const model::RopeScaling& scaling = shape.rope_scaling;
    return shape.learned_positions == 0 &&
           (scaling.kind == none || (scaling.kind == proportional && scaling.factor == 1));
}

// Longer text than the model was made for is impossible where positions are learned, and guesswork
// where RoPE has no scaling. Isolated documents have positions of their own.
void check_positions(const model::Description& found, const Config& config) {
    const int64_t sequence = config.batch.sequence;
    if (sequence <= found.context) return;
    const std::string shorter =
        "set batch.sequence to " + std::to_string(found.context) + " or less";
    if (found.shape.learned_positions > 0) {
        throw ops::LengthRefused({.what = "the model knows fewer positions than a sequence has",
                                  .where = "batch.sequence",
                                  .measured = std::to_string(sequence),
                                  .limit = std::to_string(found.context),
                                  .remedy = shorter});
    }
    if (!is_rope_unscaled(found.shape) || config.data.isolate_documents) return;
    throw ops::LengthRefused(
        {.what = "a sequence is longer than the text that the model was made for, and its RoPE has "
                 "no scaling for that",
         .where = "batch.sequence",
         .measured = std::to_string(sequence),
         .limit = std::to_string(found.context),
         .remedy = shorter + ", or say in the model's config.json how RoPE is scaled; to train it "
                             "on longer text as it is, raise max_position_embeddings there"});
}

// The table of words is at least a twelfth of all parameters: its gradient's passes are what a step
// waits for, and beside the model more logits are little memory.
bool mostly_words(const model::Shape& shape) {
    const int64_t words = shape.vocab * shape.hidden;
    if (words == 0 || shape.layers == 0) return false;
    int64_t all = 0;
    for (const model::Layer& layer : model::layers_of(shape, {}, false)) {
        for (const model::Tensor& tensor : layer.tensors) all += tensor.count;
    }
    return words >= ceil_div(all, 12);
}

// Each tile reads and writes the head's whole gradient in fp32, so a GPU wants large ones. Logits
// of no more elements than the MLP's activations of a micro-batch, or of the tile that was asked
// for, cost little memory: a block's buffers and the head's are never alive together.
int64_t head_tile_of(const Config& config, const model::Shape& shape) {
    constexpr int64_t kLeast = 1024, kMost = 4096, kLogits = 1LL << 27;
    constexpr int64_t kLogitsOfWords = 5LL << 26;  // 2,048 tokens of the largest vocabularies
    if (config.numerics.head_tile) return *config.numerics.head_tile;
    if (config.device != DeviceKind::cuda) return kLeast;
    const int64_t tokens =
        config.batch.sequence / config.parallel.sequence * config.batch.micro_batch;
    const int64_t of_mlp = std::min(config.numerics.mlp_tile.value_or(tokens), tokens);
    const int64_t logits =
        std::max(mostly_words(shape) ? kLogitsOfWords : kLogits, of_mlp * shape.intermediate);
    int64_t tile = kMost;
    while (tile > kLeast && tile * shape.vocab > logits) tile /= 2;
    return tile;
}

// A long micro-batch goes through the MLP in equal tiles: its activations are far wider than all
// else of a block, and products of so many rows keep a GPU as busy as those of more.
int64_t mlp_tile_of(const Config& config) {
    constexpr int64_t kMost = 16384, kRows = 128;
    if (config.numerics.mlp_tile) return *config.numerics.mlp_tile;
    const int64_t tokens =
        config.batch.sequence / config.parallel.sequence * config.batch.micro_batch;
    return tokens > kMost ? round_up(ceil_div(tokens, ceil_div(tokens, kMost)), kRows) : 0;
}

}  // namespace

Config without_idle_tiles(Config config, const model::Shape& shape) {
    const int64_t tokens =
        config.batch.sequence / config.parallel.sequence * config.batch.micro_batch;
    const auto decide = [&](std::optional<int64_t>& asked, const auto& tile_of) {
        if (asked.value_or(0) < tokens) return;
        asked.reset();
        const int64_t chosen = tile_of(config);
        if (chosen > 0 && chosen < tokens) asked = tokens;
    };
    decide(config.numerics.mlp_tile, [](const Config& all) { return mlp_tile_of(all); });
    decide(config.numerics.head_tile, [&](const Config& all) { return head_tile_of(all, shape); });
    return config;
}

model::Description model_of(const Config& config) {
    const ModelConfig& m = config.model;
    if (!m.path.empty()) {
        model::Description found = read_directory(config);
        check_positions(found, config);
        set_patterns(found.shape, config);
        return found;
    }
    model::Description own{.shape = {.hidden = m.hidden,
                                     .layers = m.layers,
                                     .heads = m.heads,
                                     .kv_heads = m.kv_heads,
                                     .head_dim = m.head_dim,
                                     .intermediate = m.intermediate,
                                     .vocab = m.vocab,
                                     .tie_embeddings = m.tie_embeddings,
                                     .rope_theta = m.rope_theta,
                                     .norm_eps = m.norm_eps},
                           .context = config.batch.sequence};
    set_patterns(own.shape, config);
    return own;
}

namespace {

// Whether ranks that share sequences do it in ring order. Of ranks that share tensors too each has
// some of the heads, and the choice is one for all.
bool in_ring(const Config& config, const model::Shape& shape) {
    const ParallelConfig& p = config.parallel;
    if (p.sequence == 1 || p.sequence_order == SequenceOrder::heads) return false;
    if (p.sequence_order == SequenceOrder::ring) return true;
    if (config.device != DeviceKind::cpu) return false;
    const int64_t heads = ceil_div(shape.kv_heads, int64_t{p.tensor});
    return heads % p.sequence != 0;
}

}  // namespace

model::Numerics numerics_of(const Config& config, const model::Shape& shape, const World& world) {
    const DType compute = config.precision;
    return {
        .sequence = config.batch.sequence / config.parallel.sequence,
        .micro_batch = config.batch.micro_batch,
        .parts = config.parallel.sequence,
        .part = world.part(),
        .ring = in_ring(config, shape),
        .slices = config.parallel.tensor,
        .slice = world.slicing().rank,
        .key_holders = model::key_holders_of(shape, config.parallel.tensor),
        .head_tile = head_tile_of(config, shape),
        .mlp_tile = mlp_tile_of(config),
        .documents = config.data.isolate_documents,
        .compute = compute,
        .residual = config.numerics.residual.value_or(compute == DType::f16 ? DType::f32 : compute),
        .wire = config.numerics.wire.value_or(compute)};
}

std::string description_of(const Config& config, const std::string& read, DType type) {
    if (!config.model.path.empty()) return model::with_type(read, config.model.path, type);
    const model::Description own = model_of(config);
    return model::describe_llama(own.shape, own.context, type);
}

std::string description_of(const Config& config, DType type) {
    const std::filesystem::path model(config.model.path);
    const bool given = !config.model.path.empty();
    return description_of(config, given ? read_text_file(model / "config.json", kModelFile) : "",
                          type);
}

model::Decoder decoder_of(const Config& config, int ranks, ops::Ops& ops) {
    const model::Shape shape = model_of(config).shape;
    return {model::slice_of(shape, {config.parallel.tensor}), numerics_of(config, shape),
            layers_of(config, shape, ranks), ops};
}

model::CodedMoments coded_moments_of(const Config& config, std::optional<MomentType> moments) {
    StateFormat format = format_of(config);
    format.moment_type = moments.value_or(format.moment_type);
    const OptimizerConfig& o = config.optimizer;
    return {.coded = format.moments > 0 && format.moment_type == MomentType::int8,
            .fp32 = o.fp32_moments,
            .must_match = o.fp32_moments != OptimizerConfig{}.fp32_moments};
}

namespace {

// Elements of Muon's segments, and of those what one rank would have.
struct MatrixRoom {
    int64_t elements = 0, used = 0;
};
MatrixRoom matrix_room(const std::vector<model::Layer>& layers) {
    MatrixRoom room;
    for (const model::Layer& layer : layers) {
        for (const model::Segment& s : layer.segments) room.elements += s.has_matrices() * s.count;
        for (const model::Tensor& t : layer.tensors)
            room.used += t.by_muon * round_up(t.count, optim::kLeaf);
    }
    return room;
}

// Each rank's shard holds a matrix whole, or zeros where there are not as many alike: the more
// ranks, the more of them.
void require_few_zeros(const std::vector<model::Layer>& layers, int ranks) {
    const MatrixRoom room = matrix_room(layers);
    if (ranks == 1 || room.elements <= 2 * room.used) return;
    throw Error(
        Trouble::usage,
        {.what = "muon deals a block's matrices whole to the ranks, and there are too few for all",
         .where = "optimizer.method",
         .measured = fmt::format("{} ranks: {:.0f} % of their shards would be zeros", ranks,
                                 100.0 * static_cast<double>(room.elements - room.used) /
                                     static_cast<double>(room.elements)),
         .limit = "50 %",
         .remedy = "run fewer ranks, or set optimizer.method to \"adamw\""});
}

// 0/1 Adam's ranks send what moves the weights, and get the momentum back from that. A rate is 0 at
// the ends of a schedule, if anywhere.
void require_rates(const Config& config) {
    if (config.optimizer.method != optim::Method::zeroone_adam) return;
    const optim::LrSchedule schedule = schedule_of(config);
    for (const int64_t update : {MomentumSchedule(config.optimizer).first(), config.steps}) {
        if (optim::learning_rate(schedule, update) > 0) continue;
        throw Error(
            Trouble::usage,
            {.what = "zeroone_adam divides by the learning rate, which is 0",
             .where = "schedule, update " + std::to_string(update),
             .measured = "optimizer.lr " + std::to_string(config.optimizer.lr) +
                         ", final_fraction " + std::to_string(config.schedule.final_fraction),
             .limit = "above 0 where momentum is exchanged",
             .remedy = "raise what is 0, or end the run at schedule.total_steps"});
    }
}

}  // namespace

std::vector<model::Layer> layers_of(const Config& config, const model::Shape& shape, int ranks,
                                    int slice, std::optional<MomentType> moments) {
    const int tensor = config.parallel.tensor;
    model::require_slices(shape, tensor);
    const bool muon = config.optimizer.method == optim::Method::muon;
    auto layers = model::layers_of(shape, config.freeze, config.optimizer.decay_norms_and_biases,
                                   std::max(1, ranks / tensor / config.parallel.pipeline),
                                   coded_moments_of(config, moments),
                                   {muon, config.optimizer.adamw_tensors}, {tensor, slice});
    if (muon) require_few_zeros(layers, ranks);
    return layers;
}

void require_ranks(const Config& config, int ranks) {
    const optim::Method method = config.optimizer.method;
    if (!optim::sends_momentum(method)) return;
    if (ranks > 1) return require_rates(config);
    throw Error(Trouble::usage, {.what = std::string(optim::name_of(method)) +
                                         " is about what ranks send each other",
                                 .where = "optimizer.method",
                                 .measured = "1 rank",
                                 .limit = "2 ranks or more",
                                 .remedy = "run several ranks (mpirun -n N; ferry plan --ranks N), "
                                           "or set optimizer.method to \"adamw\""});
}

CodedParts coded_parts(const std::vector<model::Layer>& layers) {
    CodedParts parts;
    for (const model::Layer& layer : layers)
        for (const model::Tensor& t : layer.tensors)
            if (t.trainable) (t.fp32_moments ? parts.fp32 : parts.coded).add(t);
    return parts;
}

std::string muon_rule(const Config& config, const std::vector<model::Layer>& layers, int ranks) {
    if (config.optimizer.method != optim::Method::muon) return {};
    TensorCount muon, adamw;
    std::set<std::string> kinds;
    for (const model::Layer& layer : layers) {
        for (const model::Tensor& t : layer.tensors) {
            if (!t.trainable) continue;
            (t.by_muon ? muon : adamw).add(t);
            // Without the block: model.layers.0.mlp.up_proj.weight is mlp.up_proj.
            const size_t number = t.name.find_first_of("0123456789");
            const size_t from = t.name.find('.', number) + 1;
            if (t.by_muon) kinds.insert(t.name.substr(from, t.name.rfind('.') - from));
        }
    }
    std::string text = fmt::format(
        "muon updates the matrices of the blocks: {} with {} parameters ({}); adamw all else, {} "
        "tensors with {}",
        muon.tensors, muon.elements, fmt::join(kinds, ", "), adamw.tensors, adamw.elements);
    if (const MatrixRoom room = matrix_room(layers); ranks > 1)
        text += fmt::format(
            "; each of {} ranks updates whole matrices, dealt with {:.0f} % of zeros", ranks,
            100.0 * static_cast<double>(room.elements - room.used) /
                static_cast<double>(room.elements));
    return text;
}

std::string layer_name(const std::vector<model::Layer>& layers, int64_t layer) {
    const model::Layer& l = layers[static_cast<size_t>(layer)];
    switch (l.kind) {
        case model::LayerKind::embedding:
            return "the embedding";
        case model::LayerKind::block:
            return "block " + std::to_string(l.index);
        case model::LayerKind::head:
            return "the head and loss";
    }
    return "?";
}

}  // namespace ferry::train
