// The tensors of each layer's flat buffer, in their order.
#include <algorithm>
#include <string>

#include "base/text.h"
#include "families.h"
#include "ferry/units.h"
#include "model/model.h"

namespace ferry::model {
namespace {

constexpr int64_t kSegmentUnit = 4096;

// '*' any run, '?' any one character. Where a character differs only the last star can have taken
// too few: what stood before it matched as early as it could.
bool matches(std::string_view pattern, std::string_view name) {
    size_t at = 0, in_name = 0;
    size_t after_star = std::string_view::npos, star_end = 0;  // in the pattern, in the name
    while (in_name < name.size()) {
        if (at < pattern.size() && pattern[at] == '*') {
            after_star = ++at;
            star_end = in_name;
        } else if (at < pattern.size() && (pattern[at] == '?' || pattern[at] == name[in_name])) {
            ++at;
            ++in_name;
        } else if (after_star != std::string_view::npos) {
            at = after_star;
            in_name = ++star_end;
        } else {
            return false;
        }
    }
    return pattern.find_first_not_of('*', at) == std::string_view::npos;
}

// Glob patterns of a key, and which of them some tensor's name has matched.
class Patterns {
public:
    Patterns(std::string key, std::span<const std::string> patterns)
        : key_(std::move(key)), patterns_(patterns), used_(patterns.size(), false) {}

    bool match(std::string_view name) {
        bool any = false;
        for (size_t i = 0; i < patterns_.size(); ++i) {
            if (!matches(patterns_[i], name)) continue;
            used_[i] = true;
            any = true;
        }
        return any;
    }

    void check_all_used(const Shape& shape) const {
        for (size_t i = 0; i < patterns_.size(); ++i) {
            if (used_[i]) continue;
            if (shape.tie_embeddings && matches(patterns_[i], name_of(shape, Role::head_table)))
                throw head_is_embedding(shape, i);
            throw Error(Trouble::usage,
                        {.what = key_ + " pattern matches no tensor",
                         .where = place(i),
                         .measured = shown(patterns_[i]),
                         .remedy = "names look like model.layers.0.self_attn.q_proj.weight; "
                                   "* stands for any run of characters, ? for one"});
        }
    }

private:
    std::string place(size_t i) const { return key_ + "[" + std::to_string(i) + "]"; }

    static std::string name_of(const Shape& shape, Role role) {
        const FamilyNames& family = names_of(shape.family);
        return full_name(family, *std::ranges::find(family.names, role, &TensorName::role), -1);
    }

    Error head_is_embedding(const Shape& shape, size_t i) const {
        const std::string table = name_of(shape, Role::token_table);
        return {Trouble::usage,
                {.what = "the head has no tensor of its own: its embeddings are tied, and the "
                         "embedding is the head",
                 .where = place(i),
                 .measured = shown(patterns_[i]),
                 .remedy = (key_ == "freeze" ? "freeze " : "name ") + table +
                           ", which is both, or leave the pattern out"}};
    }

    const std::string key_;
    std::span<const std::string> patterns_;
    std::vector<bool> used_;
};

// torchao's rule: tensors smaller than that, or not divisible into blocks, keep fp32 moments.
constexpr int64_t kLeastCoded = 4096;

bool can_be_coded(const Tensor& t) {
    return t.shape.size() > 1 && t.count >= kLeastCoded && t.count % kMomentBlock == 0;
}

// Rows and columns of a role's matrix, or the length of its vector.
std::vector<int64_t> extent_of(const Shape& s, Role role) {
    const int64_t q = s.heads * s.head_dim, kv = s.kv_heads * s.head_dim;
    const int64_t hidden = s.hidden, inner = s.intermediate;
    switch (role) {
        case Role::token_table:
        case Role::head_table:
            return {s.vocab, hidden};
        case Role::position_table:
            return {s.learned_positions, hidden};
        case Role::query:
            return {q, hidden};
        case Role::key:
        case Role::value:
            return {kv, hidden};
        case Role::query_key_value:
            return {q + 2 * kv, hidden};
        case Role::output:
            return {hidden, q};
        case Role::gate:
        case Role::up:
            return {inner, hidden};
        case Role::down:
            return {hidden, inner};
        case Role::query_norm:
        case Role::key_norm:
            return {s.head_dim};
        case Role::query_bias:
            return {q};
        case Role::key_bias:
        case Role::value_bias:
            return {kv};
        case Role::query_key_value_bias:
            return {q + 2 * kv};
        case Role::gate_bias:
        case Role::up_bias:
            return {inner};
        default:  // norms and what is added to the residual stream
            return {hidden};
    }
}

// Whether a model of this shape has the tensor, if its family knows it.
bool has(const Shape& s, Role role) {
    switch (role) {
        case Role::position_table:
            return s.learned_positions > 0;
        case Role::head_table:
            return !s.tie_embeddings;
        case Role::gate:
            return s.gated;
        case Role::attention_norm_bias:
        case Role::mlp_norm_bias:
        case Role::final_norm_bias:
            return s.layer_norm;
        case Role::query_norm:
        case Role::key_norm:
            return s.head_norms;
        case Role::query_bias:
        case Role::key_bias:
        case Role::value_bias:
        case Role::query_key_value_bias:
            return s.qkv_bias;
        case Role::output_bias:
            return s.output_bias;
        case Role::gate_bias:
            return s.gated && s.mlp_bias;
        case Role::up_bias:
        case Role::down_bias:
            return s.mlp_bias;
        default:
            return true;
    }
}

LayerKind kind_of(Role role) {
    switch (role) {
        case Role::token_table:
        case Role::position_table:
            return LayerKind::embedding;
        case Role::head_table:
        case Role::final_norm:
        case Role::final_norm_bias:
            return LayerKind::head;
        default:
            return LayerKind::block;
    }
}

// In the order of the roles.
std::vector<Tensor> tensors_of(const Shape& s, LayerKind kind, int64_t block, bool decay_norms,
                               const Slicing& slicing) {
    const FamilyNames& family = names_of(s.family);
    std::vector<Tensor> tensors;
    for (const TensorName& known : family.names) {
        if (kind_of(known.role) != kind || !has(s, known.role)) continue;
        Tensor t{.name = full_name(family, known, block),
                 .role = known.role,
                 .shape = extent_of(s, known.role)};
        const bool matrix = t.shape.size() > 1;
        if (matrix && kind == LayerKind::block && family.input_major)
            std::swap(t.shape[0], t.shape[1]);
        t.count = matrix ? t.shape[0] * t.shape[1] : t.shape[0];
        t.decays = matrix || decay_norms;
        tensors.push_back(slice_of(s, std::move(t), slicing));
    }
    std::ranges::sort(tensors, {}, &Tensor::role);
    return tensors;
}

// The settings that decide whether a tensor trains, and decays.
struct Fates {
    Patterns freeze, fp32, adamw;
    bool coded = false, muon = false;

    void decide(Tensor& t, LayerKind kind) {
        t.trainable = !freeze.match(t.name);
        if (!t.trainable) t.decays = false;
        const bool named = fp32.match(t.name);
        t.fp32_moments = coded && t.trainable && (named || !can_be_coded(t));
        const bool for_adamw = adamw.match(t.name);
        t.by_muon =
            muon && kind == LayerKind::block && t.shape.size() > 1 && t.trainable && !for_adamw;
    }
};

// Muon's update needs a matrix whole: it lies in one shard of a segment. Shards are exchanged
// alike, and so are as large as the largest matrix of their segment; those of like sizes share one.
// Which shard has the largest goes round with the block, for it takes the longest to update.
void deal_matrices(Layer& layer, std::span<Tensor> matrices, int shards) {
    const auto fits = [](const Tensor& t) { return std::pair(t.fp32_moments, -t.count); };
    if (shards > 1) std::ranges::stable_sort(matrices, {}, fits);
    while (!matrices.empty()) {
        size_t count = 1;
        while (count < std::min(matrices.size(), static_cast<size_t>(shards)) &&
               matrices[count].fp32_moments == matrices[0].fp32_moments)
            ++count;
        const auto dealt = matrices.first(count);
        const int64_t shard = round_up(dealt[0].count, kSegmentUnit);
        Segment segment{.offset = layer.elements,
                        .count = shard * shards,
                        .decays = dealt[0].decays,
                        .fp32_moments = dealt[0].fp32_moments,
                        .matrices = std::vector<MatrixShape>(static_cast<size_t>(shards))};
        for (size_t i = 0; i < count; ++i) {
            const auto at = (i + static_cast<size_t>(layer.index)) % static_cast<size_t>(shards);
            dealt[i].offset = segment.offset + static_cast<int64_t>(at) * shard;
            segment.matrices[at] = {dealt[i].shape[0], dealt[i].shape[1]};
        }
        std::ranges::sort(dealt, {}, &Tensor::offset);
        layer.elements += segment.count;
        layer.trainable_elements += segment.count;
        layer.segments.push_back(std::move(segment));
        matrices = matrices.subspan(count);
    }
}

// Places the tensors: Muon's; trainable and decayed, trainable and not decayed, frozen; in each the
// given order, so that q, k, v (and gate, up) stay adjacent when they share a fate. A tensor of
// coded moments begins at a block: all before it in its segment are whole blocks.
Layer lay_out(LayerKind kind, int64_t index, std::vector<Tensor> tensors, Fates& fates,
              int shards) {
    for (Tensor& t : tensors) fates.decide(t, kind);
    // What several ranks hold is in segments of its own: the norm counts it once.
    const auto rank = [](const Tensor& t) {
        if (t.by_muon) return std::pair(-1, 1);
        if (!t.trainable) return std::pair(4, 1);
        return std::pair((t.decays ? 0 : 2) + (t.fp32_moments ? 1 : 0), t.holders);
    };
    std::ranges::stable_sort(tensors, {}, rank);
    Layer layer{.kind = kind, .index = index};
    const auto of_muon = static_cast<size_t>(std::ranges::count_if(tensors, &Tensor::by_muon));
    deal_matrices(layer, std::span(tensors).first(of_muon), shards);
    for (size_t i = of_muon; i < tensors.size();) {
        Segment segment{.offset = layer.elements,
                        .decays = tensors[i].decays,
                        .trainable = tensors[i].trainable,
                        .fp32_moments = tensors[i].fp32_moments,
                        .holders = tensors[i].trainable ? tensors[i].holders : 1};
        const auto fate = rank(tensors[i]);
        do {
            tensors[i].offset = segment.offset + segment.count;
            segment.count += tensors[i].count;
            ++i;
        } while (i < tensors.size() && rank(tensors[i]) == fate);
        segment.count = round_up(segment.count, kSegmentUnit * shards);
        layer.elements += segment.count;
        if (segment.trainable) layer.trainable_elements += segment.count;
        layer.segments.push_back(std::move(segment));
    }
    layer.tensors = std::move(tensors);
    return layer;
}

bool has_matrix(const std::vector<Layer>& layers) {
    return std::ranges::any_of(layers, [](const Layer& layer) {
        return std::ranges::any_of(layer.segments, &Segment::has_matrices);
    });
}

}  // namespace

const Tensor* Layer::find(Role role) const {
    const auto found = std::ranges::find(tensors, role, &Tensor::role);
    return found == tensors.end() ? nullptr : &*found;
}

std::vector<Layer> layers_of(const Shape& shape, std::span<const std::string> freeze,
                             bool decay_norms, int shards, const CodedMoments& moments,
                             const MuonMatrices& muon, const Slicing& slicing) {
    Fates fates{.freeze = {"freeze", freeze},
                .fp32 = {"optimizer.fp32_moments", moments.fp32},
                .adamw = {"optimizer.adamw_tensors", muon.adamw},
                .coded = moments.coded,
                .muon = muon.on};
    std::vector<Layer> layers;
    const auto add = [&](LayerKind kind, int64_t index, int64_t block) {
        layers.push_back(lay_out(kind, index, tensors_of(shape, kind, block, decay_norms, slicing),
                                 fates, shards));
    };
    add(LayerKind::embedding, 0, -1);
    for (int64_t i = 0; i < shape.layers; ++i) add(LayerKind::block, i, i);
    add(LayerKind::head, 0, -1);
    fates.freeze.check_all_used(shape);
    if (moments.must_match) fates.fp32.check_all_used(shape);
    fates.adamw.check_all_used(shape);
    if (muon.on && !has_matrix(layers))
        throw Error(Trouble::usage,
                    {.what = "muon has no matrix to update: no matrix of a block is left to it",
                     .where = "freeze, optimizer.adamw_tensors",
                     .limit = "at least one, such as model.layers.0.mlp.up_proj.weight",
                     .remedy = "take a pattern away, or set optimizer.method to \"adamw\""});
    return layers;
}

}  // namespace ferry::model
