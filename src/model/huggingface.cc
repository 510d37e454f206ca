#include "model/huggingface.h"

#include <algorithm>
#include <array>
#include <span>
#include <string>

#include "families.h"
#include "huggingface_rope.h"
#include "json_keys.h"

namespace ferry::model {
namespace {

using nlohmann::json;

// ---------------------------------------------------------------- what each family says where

// An option of which ferry does some values.
struct Demand {
    std::string_view key;
    std::array<std::string_view, 3> values;  // as JSON; the first is what an absent key means
};

enum class Bias : uint8_t { never, always, asked };
enum class Window : uint8_t { none, all_blocks, upper_blocks };

// The keys of a family's config.json.
struct Keys {
    Family family;
    std::string_view hidden, layers, heads, kv_heads, inner, context, eps;
    double default_eps;
    Bias qkv_bias;     // asked: attention_bias
    Bias output_bias;  // the same
    Bias mlp_bias;     // asked: mlp_bias
    Window window;
    bool head_norms;
    bool classic;   // LayerNorm, GELU, learned positions; else RMSNorm, SwiGLU, RoPE
    bool tied;      // when tie_word_embeddings is absent
    bool dropping;  // when the keys of dropout are absent
    int64_t absent_kv_heads, absent_head_dim;  // 0: as many as heads, hidden / heads
    std::span<const Demand> demands;
    std::span<const std::string_view> dropouts;
};

constexpr Demand kSilu[] = {{"hidden_act", {"\"silu\"", "\"swish\""}}};
constexpr Demand kGpt2Demands[] = {
    {"activation_function", {"\"gelu_new\"", "\"gelu_pytorch_tanh\""}},
    {"scale_attn_weights", {"true"}},
    {"scale_attn_by_inverse_layer_idx", {"false"}},
    {"reorder_and_upcast_attn", {"false"}},
    {"add_cross_attention", {"false"}},
};
constexpr std::string_view kAttentionDropout[] = {"attention_dropout"};
constexpr std::string_view kGpt2Dropouts[] = {"resid_pdrop", "embd_pdrop", "attn_pdrop"};

// clang-format off
constexpr Keys kKeys[] = {
    {Family::llama, "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
     "intermediate_size", "max_position_embeddings", "rms_norm_eps", 1e-6,
     Bias::asked, Bias::asked, Bias::asked, Window::none, false, false, false, false, 0, 0, kSilu, kAttentionDropout},
    {Family::mistral, "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
     "intermediate_size", "max_position_embeddings", "rms_norm_eps", 1e-6,
     Bias::never, Bias::never, Bias::never, Window::all_blocks, false, false, false, false, 8, 0, kSilu, kAttentionDropout},
    {Family::qwen2, "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
     "intermediate_size", "max_position_embeddings", "rms_norm_eps", 1e-6,
     Bias::always, Bias::never, Bias::never, Window::upper_blocks, false, false, false, false, 32, 0, kSilu, kAttentionDropout},
    {Family::qwen3, "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
     "intermediate_size", "max_position_embeddings", "rms_norm_eps", 1e-6,
     Bias::asked, Bias::asked, Bias::never, Window::upper_blocks, true, false, false, false, 32, 128, kSilu, kAttentionDropout},
    {Family::gpt2, "n_embd", "n_layer", "n_head", "",
     "n_inner", "n_positions", "layer_norm_epsilon", 1e-5,
     Bias::always, Bias::always, Bias::always, Window::none, false, true, true, true, 0, 0, kGpt2Demands, kGpt2Dropouts},
};
// clang-format on

// ---------------------------------------------------------------- reading

constexpr Between kEpsilon{1e-30, 1}, kDeviation{1e-12, 100};

bool is_biased(const JsonKeys& in, Bias bias, std::string_view key) {
    return bias == Bias::asked ? in.flag(key, false) : bias == Bias::always;
}

void require(const JsonKeys& in, const Demand& demand) {
    const json& value = in.at(demand.key);
    if (value.is_null()) return;
    std::string known;
    for (const std::string_view one : demand.values) {
        if (one.empty()) continue;
        if (value.dump() == one) return;
        known.append(known.empty() ? "" : ", ").append(one);
    }
    in.refuse(demand.key, "an option that ferry does not support", value, "supported: " + known);
}

const Keys& keys_of(const JsonKeys& in) {
    const json& type = in.at("model_type");
    std::string known;
    for (const FamilyNames& names : families()) {
        if (type == names.model_type) return *std::ranges::find(kKeys, names.family, &Keys::family);
        known.append(known.empty() ? "" : ", ").append(names.model_type);
    }
    in.refuse("model_type", "a family of models that ferry does not support", type,
              "supported: " + known);
}

// Whether each layer is of the sliding type; empty: no types are given. The types are read even
// where no window is asked for, as transformers does.
std::vector<bool> sliding_layers(const JsonKeys& in, int64_t layers) {
    const json& types = in.at("layer_types");
    if (types.is_null()) return {};
    if (!types.is_array())
        in.refuse("layer_types", "wrong type of value", types, "a list with a type for each layer");
    if (std::ssize(types) != layers)
        in.refuse("layer_types", "not as many types as layers", types, std::to_string(layers));
    std::vector<bool> slides;
    for (const json& type : types) {
        slides.push_back(type == "sliding_attention");
        if (!slides.back() && type != "full_attention")
            in.refuse("layer_types", "a kind of attention that ferry does not support", type,
                      "supported: \"full_attention\", \"sliding_attention\"");
    }
    return slides;
}

// transformers' models of these families end in an error where layers are to slide by no window.
void check_nothing_slides(const JsonKeys& in, const std::vector<bool>& slides, bool off) {
    if (std::ranges::find(slides, true) == slides.end()) return;
    in.refuse("layer_types", "layers are to slide, and no window says how far",
              in.at("layer_types"),
              off ? "use_sliding_window true, and sliding_window a number of tokens"
                  : "sliding_window a number of tokens",
              off ? "set use_sliding_window to true, or these layers to \"full_attention\""
                  : "set sliding_window, or these layers to \"full_attention\"");
}

// The windows of the blocks: those that slide, by the list of layer types or by the older rule.
std::vector<int64_t> windows_of(const JsonKeys& in, Window rule, int64_t layers) {
    if (rule == Window::none) return {};
    const bool all = rule == Window::all_blocks;
    const json& size = in.at("sliding_window");
    const std::vector<bool> slides = sliding_layers(in, layers);
    const bool off = !all && !in.flag("use_sliding_window", false);
    if (off || (size.is_null() && in.has("sliding_window"))) {
        if (!all) check_nothing_slides(in, slides, off);
        return {};
    }
    const int64_t window = in.integer("sliding_window", 4096);
    std::vector<int64_t> windows(static_cast<size_t>(layers), all ? window : 0);
    if (!slides.empty()) {
        for (size_t i = 0; i < windows.size(); ++i) windows[i] = slides[i] ? window : 0;
    } else if (!all) {
        const json& below = in.at("max_window_layers");
        const int64_t first = below == 0 ? 0 : in.integer("max_window_layers", 28);
        for (int64_t i = first; i < layers; ++i) windows[static_cast<size_t>(i)] = window;
    }
    return windows;
}

// As many as ferry's own configuration takes. A layer's work at start-up comes before its tensors
// are looked for.
constexpr int64_t kMostLayers = 65536;
// And of a head, whose elements have frequencies, all of them computed.
constexpr int64_t kMostHeadDim = 65536;

// In floating point: sizes that each are allowed may have a product that no integer holds.
void check_elements(const JsonKeys& in, const Keys& keys, const Shape& s) {
    constexpr double kMost = 1e15;
    const auto real = [](int64_t size) { return static_cast<double>(size); };
    const double attention = 2 * real(s.head_dim) * (real(s.heads) + real(s.kv_heads));
    const double block = real(s.hidden) * (attention + (s.gated ? 3 : 2) * real(s.intermediate));
    const double elements = real(s.layers) * block + real(s.vocab) * real(s.hidden);
    if (elements <= kMost) return;
    throw Error(Trouble::usage,
                {.what = "a model larger than any",
                 .where = in.where(),
                 .measured = json(elements).dump() + " parameters",
                 .limit = json(kMost).dump(),
                 .remedy = "check " + std::string(keys.layers) + ", " + std::string(keys.hidden) +
                           ", " + std::string(keys.inner) + " and vocab_size"});
}

void read_sizes(const JsonKeys& in, const Keys& keys, Shape& s) {
    s.hidden = in.integer(keys.hidden, 0);
    s.layers = in.integer(keys.layers, 0, kMostLayers);
    s.heads = in.integer(keys.heads, 0);
    s.vocab = in.integer("vocab_size", 0);
    // An absent key and null differ: null is written by who means the rule.
    const bool usual_kv_heads = keys.absent_kv_heads == 0 || in.has(keys.kv_heads);
    s.kv_heads = keys.kv_heads.empty()
                     ? s.heads
                     : in.integer(keys.kv_heads, usual_kv_heads ? s.heads : keys.absent_kv_heads);
    s.intermediate = in.integer(keys.inner, keys.classic ? 4 * s.hidden : 0);
    s.norm_eps = in.number(keys.eps, keys.default_eps, kEpsilon);
    const bool usual_head_dim = keys.absent_head_dim == 0 || in.has("head_dim");
    if (usual_head_dim && in.at("head_dim").is_null() && s.hidden % s.heads != 0)
        in.refuse(keys.heads, "the hidden width is not divisible by the heads", s.heads,
                  std::string(keys.hidden) + " " + std::to_string(s.hidden));
    s.head_dim = in.integer("head_dim", usual_head_dim ? s.hidden / s.heads : keys.absent_head_dim,
                            kMostHeadDim);
    if (s.heads % s.kv_heads != 0)
        in.refuse(keys.kv_heads, "the heads are not divisible by the key and value heads",
                  s.kv_heads, std::string(keys.heads) + " " + std::to_string(s.heads));
}

// Negative ones count from the end, as torch has it.
int64_t padding_token(const JsonKeys& in, int64_t vocab) {
    const json& value = in.at("pad_token_id");
    if (value.is_null()) return -1;
    const auto end = static_cast<double>(vocab);
    if (!value.is_number_integer() || value.get<double>() < -end || value.get<double>() >= end)
        in.refuse("pad_token_id", "the padding token is no row of the embedding", value,
                  std::to_string(-vocab) + " to " + std::to_string(vocab - 1),
                  "correct it, or leave the key out");
    const auto token = value.get<int64_t>();
    return token < 0 ? token + vocab : token;
}

// Both names of the type that the weights have: export writes another there.
void check_type(const JsonKeys& in) {
    for (const char* key : {"dtype", "torch_dtype"}) {
        const json& type = in.at(key);
        if (!type.is_null() && !type.is_string())
            in.refuse(key, "the type of the weights is no name", type,
                      "one name, such as \"bfloat16\"", "leave the key out, or name the type");
    }
}

bool has_dropout(const JsonKeys& in, const Keys& keys) {
    return std::ranges::any_of(keys.dropouts, [&](std::string_view key) {
        const json& value = in.at(key);
        return value.is_null() ? keys.dropping : value != 0;
    });
}

json parse(std::string_view text, const std::string& where) {
    json config = parse_json(
        text, {.where = where, .what = "not the configuration of a model: not valid JSON"});
    if (config.is_object()) return config;
    throw Error(Trouble::usage, {.what = "not the configuration of a model: no JSON object",
                                 .where = where,
                                 .measured = shown_json(config),
                                 .remedy = "name a directory that transformers can load"});
}

}  // namespace

Description read_description(std::string_view text, const std::string& where) {
    const json config = parse(text, where);
    const JsonKeys in(config, where);
    const Keys& keys = keys_of(in);
    for (const Demand& demand : keys.demands) require(in, demand);
    check_type(in);
    if (!in.at("quantization_config").is_null())
        in.refuse("quantization_config", "quantized weights cannot be trained",
                  in.at("quantization_config"), "",
                  "use the model's weights in bf16, fp16 or fp32");
    Description found{.context = in.integer(keys.context, 0), .drops = has_dropout(in, keys)};
    Shape& s = found.shape;
    s.family = keys.family;
    read_sizes(in, keys, s);
    s.tie_embeddings = in.flag("tie_word_embeddings", keys.tied);
    s.layer_norm = keys.classic;
    s.gated = !keys.classic;
    check_elements(in, keys, s);
    if (s.head_dim > kMostHeadDim)
        in.refuse(keys.heads, "too few heads: each would be wider than any", s.heads,
                  std::string(keys.hidden) + " " + std::to_string(s.hidden) + ", heads of up to " +
                      std::to_string(kMostHeadDim) + " elements");
    s.qkv_bias = is_biased(in, keys.qkv_bias, "attention_bias");
    s.output_bias = is_biased(in, keys.output_bias, "attention_bias");
    s.mlp_bias = is_biased(in, keys.mlp_bias, "mlp_bias");
    s.head_norms = keys.head_norms;
    s.windows = windows_of(in, keys.window, s.layers);
    s.initial_deviation = in.number_or_zero("initializer_range", 0.02, kDeviation);
    s.smaller_residuals = keys.classic;
    // transformers' gpt2 has an embedding without padding.
    if (!keys.classic) s.padding_token = padding_token(in, s.vocab);
    if (keys.classic) {
        s.learned_positions = found.context;
    } else {
        read_rope(in, found.context, s);
        if (s.head_dim % 2 != 0)
            in.refuse("head_dim", "the elements of a head must be even: RoPE turns them in pairs",
                      s.head_dim, "an even number");
    }
    return found;
}

std::string_view optional_prefix(Family family) { return names_of(family).prefix; }

}  // namespace ferry::model
