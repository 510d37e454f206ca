// What each layer's flat buffer holds, and in which order.
#include <algorithm>
#include <string>

#include "ferry/model.h"

namespace ferry::model {
namespace {

constexpr int64_t kSegmentUnit = 4096;

// '*' any run, '?' any one character.
bool matches(std::string_view pattern, std::string_view name) {
    if (pattern.empty()) return name.empty();
    if (pattern[0] == '*') {
        return matches(pattern.substr(1), name) ||
               (!name.empty() && matches(pattern, name.substr(1)));
    }
    return !name.empty() && (pattern[0] == '?' || pattern[0] == name[0]) &&
           matches(pattern.substr(1), name.substr(1));
}

class Freezer {
public:
    explicit Freezer(std::span<const std::string> patterns)
        : patterns_(patterns), used_(patterns.size(), false) {}

    bool frozen(std::string_view name) {
        bool any = false;
        for (size_t i = 0; i < patterns_.size(); ++i) {
            if (!matches(patterns_[i], name)) continue;
            used_[i] = true;
            any = true;
        }
        return any;
    }

    void check_all_used() const {
        for (size_t i = 0; i < patterns_.size(); ++i) {
            if (used_[i]) continue;
            throw Error(Trouble::usage,
                        {.what = "freeze pattern matches no tensor",
                         .where = "freeze[" + std::to_string(i) + "]",
                         .measured = patterns_[i],
                         .remedy = "names look like model.layers.0.self_attn.q_proj.weight; "
                                   "* stands for any run of characters, ? for one"});
        }
    }

private:
    std::span<const std::string> patterns_;
    std::vector<bool> used_;
};

Tensor matrix(std::string name, int64_t rows, int64_t cols) {
    return {.name = std::move(name), .shape = {rows, cols}, .count = rows * cols};
}

Tensor norm(std::string name, int64_t hidden, bool decays) {
    return {.name = std::move(name), .shape = {hidden}, .count = hidden, .decays = decays};
}

// Places the tensors: trainable and decayed, trainable and not decayed, frozen; in each the given
// order, so that q, k, v (and gate, up) stay adjacent when they share a fate.
Layer lay_out(LayerKind kind, int64_t index, std::vector<Tensor> tensors, Freezer& freezer) {
    for (Tensor& t : tensors) {
        t.trainable = !freezer.frozen(t.name);
        if (!t.trainable) t.decays = false;
    }
    const auto rank = [](const Tensor& t) { return t.trainable ? (t.decays ? 0 : 1) : 2; };
    std::ranges::stable_sort(tensors, {}, rank);
    Layer layer{.kind = kind, .index = index};
    for (size_t i = 0; i < tensors.size();) {
        Segment segment{.offset = layer.elements,
                        .decays = tensors[i].decays,
                        .trainable = tensors[i].trainable};
        const int fate = rank(tensors[i]);
        for (; i < tensors.size() && rank(tensors[i]) == fate; ++i) {
            tensors[i].offset = segment.offset + segment.count;
            segment.count += tensors[i].count;
        }
        segment.count = round_up(segment.count, kSegmentUnit);
        layer.elements += segment.count;
        if (segment.trainable) layer.trainable_elements += segment.count;
        layer.segments.push_back(segment);
    }
    layer.tensors = std::move(tensors);
    return layer;
}

std::vector<Tensor> block_tensors(const Shape& s, int64_t index, bool decay_norms) {
    const std::string at = "model.layers." + std::to_string(index) + ".";
    const int64_t q = s.heads * s.head_dim, kv = s.kv_heads * s.head_dim;
    std::vector<Tensor> t;
    t.push_back(matrix(at + "self_attn.q_proj.weight", q, s.hidden));
    t.push_back(matrix(at + "self_attn.k_proj.weight", kv, s.hidden));
    t.push_back(matrix(at + "self_attn.v_proj.weight", kv, s.hidden));
    t.push_back(matrix(at + "self_attn.o_proj.weight", s.hidden, q));
    t.push_back(matrix(at + "mlp.gate_proj.weight", s.intermediate, s.hidden));
    t.push_back(matrix(at + "mlp.up_proj.weight", s.intermediate, s.hidden));
    t.push_back(matrix(at + "mlp.down_proj.weight", s.hidden, s.intermediate));
    t.push_back(norm(at + "input_layernorm.weight", s.hidden, decay_norms));
    t.push_back(norm(at + "post_attention_layernorm.weight", s.hidden, decay_norms));
    return t;
}

}  // namespace

const Tensor& Layer::tensor(std::string_view suffix) const {
    const auto found = std::ranges::find_if(
        tensors, [&](const Tensor& t) { return std::string_view(t.name).ends_with(suffix); });
    FERRY_CHECK(found != tensors.end(), suffix);
    return *found;
}

std::vector<Layer> layers_of(const Shape& shape, std::span<const std::string> freeze,
                             bool decay_norms) {
    Freezer freezer(freeze);
    std::vector<Layer> layers;
    layers.push_back(lay_out(LayerKind::embedding, 0,
                             {matrix("model.embed_tokens.weight", shape.vocab, shape.hidden)},
                             freezer));
    for (int64_t i = 0; i < shape.layers; ++i) {
        layers.push_back(
            lay_out(LayerKind::block, i, block_tensors(shape, i, decay_norms), freezer));
    }
    std::vector<Tensor> head;
    if (!shape.tie_embeddings) head.push_back(matrix("lm_head.weight", shape.vocab, shape.hidden));
    head.push_back(norm("model.norm.weight", shape.hidden, decay_norms));
    layers.push_back(lay_out(LayerKind::head, 0, std::move(head), freezer));
    freezer.check_all_used();
    return layers;
}

}  // namespace ferry::model
