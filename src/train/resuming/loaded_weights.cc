#include "loaded_weights.h"

#include <spdlog/fmt/fmt.h>
#include <spdlog/fmt/ranges.h>

#include <algorithm>
#include <array>
#include <bit>
#include <set>

#include "base/checksum.h"
#include "base/log.h"
#include "checkpoint/saved.h"
#include "ferry/units.h"
#include "model/huggingface.h"
#include "prove_files.h"

namespace ferry::train {
namespace {

// Tensors of older files that are no weights: causal masks, and RoPE's table.
constexpr std::string_view kNoWeights[] = {".attn.bias", ".attn.masked_bias",
                                           "rotary_emb.inv_freq"};

// The head's table, which a model with tied embeddings may hold beside the embedding's.
constexpr std::string_view kHeadTable = "lm_head.weight";

bool is_no_weight(std::string_view name) {
    return std::ranges::any_of(kNoWeights, [&](std::string_view e) { return name.ends_with(e); });
}

}  // namespace

std::unique_ptr<LoadedWeights> LoadedWeights::of(const ModelConfig& config,
                                                 const model::Shape& shape,
                                                 const std::vector<model::Layer>& layers) {
    if (config.path.empty() || !config.load) return nullptr;
    return std::make_unique<LoadedWeights>(config.path, shape, layers);
}

LoadedWeights::LoadedWeights(const std::string& path, const model::Shape& shape,
                             const std::vector<model::Layer>& layers)
    : path_(path), weights_(path), proof_(checkpoint::files_of_model(path)) {
    for (const checkpoint::Shard& file : proof_.files)
        for (const checkpoint::ArraySum& array : file.arrays) stripes_[array.name] = array.stripes;
    const std::string_view prefix = model::optional_prefix(shape.family);
    std::string missing;
    int64_t count = 0;
    for (const model::Layer& layer : layers) {
        for (const model::Tensor& tensor : layer.tensors) {
            const std::string_view name = tensor.name;
            const checkpoint::StoredTensor* stored = weights_.find(name);
            if (stored == nullptr && name.starts_with(prefix))
                stored = weights_.find(name.substr(prefix.size()));
            if (stored == nullptr) {
                if (count++ == 0) missing = tensor.name;
                continue;
            }
            check(tensor, *stored);
            stored_[tensor.name] = stored;
            bytes_ +=
                tensor.count * size_of(stored->type.value_or(DType::f32));  // check() saw to it
        }
    }
    if (count > 0) {
        throw Error(Trouble::usage,
                    {.what = "the weights lack a tensor of the model",
                     .where = path_ + ": " + missing,
                     .measured = fmt::format("{} tensors missing", count),
                     .remedy = "check that config.json and the weights belong together, or set "
                               "model.load to false for random weights"});
    }
    check_unknown(shape);
    if (shape.tie_embeddings) check_copy(*layers.front().find(model::Role::token_table));
}

uint64_t LoadedWeights::digest() const {
    constexpr int64_t kPlaces = 4, kValues = 1024;
    std::vector<float> values(kValues);
    uint64_t all = 0;
    const auto fold = [&all](std::span<const std::byte> bytes) {
        const std::array<uint64_t, 2> pair{all, checksum(bytes)};
        all = checksum(std::as_bytes(std::span(pair)));
    };
    for (const auto& [name, tensor] : stored_) {
        const std::string kind = name + " " + tensor->dtype;
        fold(std::as_bytes(std::span(kind)));
        const int64_t count = tensor->count();
        const std::span<float> some =
            std::span(values).first(static_cast<size_t>(std::min(kValues, count)));
        for (int64_t place = 0; place < kPlaces; ++place) {
            weights_.read(*tensor, (count - std::ssize(some)) * place / (kPlaces - 1), some);
            fold(std::as_bytes(some));
        }
    }
    return all;
}

std::string first_weights(const LoadedWeights* loaded, const model::Shape& shape) {
    return loaded ? fmt::format("the files of model.path, {:016x}", loaded->digest())
                  : fmt::format("random, of standard deviation {}", shape.initial_deviation);
}

void LoadedWeights::log_rate(double seconds) const {
    log_info(fmt::format("{} of weights were read to their tiers in {:.2f} s, {:.2f} GB/s",
                         format_bytes(bytes_), seconds,
                         static_cast<double>(bytes_) * 1e-9 / seconds));
}

void LoadedWeights::prove(Team& team, int part, int parts, StartUp& start_up) const {
    std::vector<checkpoint::Shard> files;
    for (const checkpoint::Shard& file : proof_.files)
        if (!file.in_stripes()) files.push_back(file);  // texts, or all of them
    if (files.empty()) return;
    try {
        prove_files(proof_.checkpoint, files, team, part, parts, start_up);
    } catch (const Error& error) {
        throw checkpoint::of_model(error);
    }
}

void LoadedWeights::check(const model::Tensor& tensor,
                          const checkpoint::StoredTensor& stored) const {
    const std::string where = weights_.file_of(stored) + ": " + stored.name;
    if (stored.shape != tensor.whole_shape()) {
        throw Error(Trouble::usage,
                    {.what = "a tensor's shape is not what config.json says",
                     .where = where,
                     .measured = fmt::format("[{}]", fmt::join(stored.shape, ", ")),
                     .limit = fmt::format("[{}]", fmt::join(tensor.whole_shape(), ", ")),
                     .remedy = "name the configuration of these weights, or the "
                               "weights of this model"});
    }
    if (!stored.type) {
        throw Error(Trouble::usage, {.what = "weights of a type that ferry does not read",
                                     .where = where,
                                     .measured = stored.dtype,
                                     .limit = "F32, BF16 or F16",
                                     .remedy = "convert them to one of these"});
    }
}

// A tensor that nobody asked for means that the model is another one than config.json says.
void LoadedWeights::check_unknown(const model::Shape& shape) const {
    std::set<const checkpoint::StoredTensor*> used;
    for (const auto& [name, stored] : stored_) used.insert(stored);
    for (const checkpoint::StoredTensor& stored : weights_.tensors()) {
        const bool copy = shape.tie_embeddings && stored.name == kHeadTable;
        if (used.contains(&stored) || copy || is_no_weight(stored.name)) continue;
        throw Error(Trouble::usage,
                    {.what = "the weights hold a tensor that the model does not have",
                     .where = weights_.file_of(stored) + ": " + stored.name,
                     .remedy = "check that config.json and the weights belong together"});
    }
}

// transformers' versions differ in which of the two tables holds where they differ: 5 unties them,
// older ones take either. Whoever made the weights knows what they are.
void LoadedWeights::check_copy(const model::Tensor& table) const {
    const checkpoint::StoredTensor* copy = weights_.find(kHeadTable);
    if (copy == nullptr) return;
    check(table, *copy);
    constexpr int64_t kPart = kMiB;
    std::vector<float> own, copied;
    for (int64_t first = 0; first < table.count; first += kPart) {
        own.resize(static_cast<size_t>(std::min(kPart, table.count - first)));
        copied.resize(own.size());
        weights_.read(*stored_.at(table.name), first, own);
        weights_.read(*copy, first, copied);
        const auto [mine, other] = std::ranges::mismatch(own, copied, [](float a, float b) {
            return std::bit_cast<uint32_t>(a) == std::bit_cast<uint32_t>(b);
        });
        if (mine == own.end()) continue;
        throw Error(
            Trouble::usage,
            {.what = "the embeddings are tied, and the head has a table of its own",
             .where = weights_.file_of(*copy) + ": " + copy->name,
             .measured = fmt::format("element {} is {}", first + (mine - own.begin()), *other),
             .limit = fmt::format("{}, as in {}", *mine, table.name),
             .remedy = "if the head is the model's own set tie_word_embeddings to false in "
                       "config.json, else take its table out of the weights"});
    }
}

checkpoint::TensorSource LoadedWeights::source_of(const checkpoint::StoredTensor& stored) const {
    const auto stripes = stripes_.find(stored.name);
    return {.weights = &weights_,
            .stored = &stored,
            .bytes = stored.count() * size_of(stored.type.value_or(DType::f32)),
            .stripes = stripes == stripes_.end() ? std::span<const uint64_t>() : stripes->second};
}

checkpoint::TensorSource LoadedWeights::source_of(const model::Tensor& tensor) const {
    return source_of(*stored_.at(tensor.name));
}

void LoadedWeights::begin(const planner::Plan& plan, std::span<const StateIo::ChunkRun> parts,
                          Team& team, int64_t memory) {
    ahead_ = std::make_unique<checkpoint::TensorsAhead>(team, memory);
    for (const StateIo::ChunkRun& part : parts) {
        const model::Layer& layer = plan.layers[static_cast<size_t>(part.chunk->layer)];
        const int64_t first = part.chunk->first + part.at, end = first + part.count;
        for (const model::Tensor& t : layer.tensors) {
            const int64_t from = std::max(first, t.offset), to = std::min(end, t.offset + t.count);
            if (from >= to) continue;
            const checkpoint::StoredTensor& stored = *stored_.at(t.name);
            const int64_t width = size_of(stored.type.value_or(DType::f32));
            for (const model::SliceRun& run : model::runs_of(t, from - t.offset, to - from))
                ahead_->want(source_of(stored), run.from * width, run.count * width);
        }
        ahead_->end_step();
    }
}

void LoadedWeights::next() {
    try {
        ahead_->next();
    } catch (const Error& error) {
        throw proof_.files.empty() ? Error(error) : checkpoint::of_model(error);
    }
}

void LoadedWeights::fill(const model::Layer& layer, int64_t first, std::span<float> out) const {
    const int64_t end = first + std::ssize(out);
    std::ranges::fill(out, 0.0f);
    for (const model::Tensor& t : layer.tensors) {
        const int64_t from = std::max(first, t.offset), to = std::min(end, t.offset + t.count);
        if (from >= to) continue;
        const checkpoint::StoredTensor& stored = *stored_.at(t.name);
        for (const model::SliceRun& run : model::runs_of(t, from - t.offset, to - from)) {
            const std::span<float> part = out.subspan(
                static_cast<size_t>(t.offset + run.at - first), static_cast<size_t>(run.count));
            if (ahead_)
                ahead_->read_floats(stored, run.from, part);
            else
                weights_.read(stored, run.from, part);
        }
    }
}

}  // namespace ferry::train
