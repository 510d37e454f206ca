#include "model/huggingface.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string>

#include "base/json_reader.h"
#include "families.h"

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

// The range that fp32 holds and that makes sense. An epsilon of 1e300 is an Inf there, which trains
// nothing; one of 1e-300 is a 0.
struct Between {
    double low = 1e-30, high = 1e30;
};
constexpr Between kAnyScale{}, kEpsilon{1e-30, 1}, kTheta{1, 1e15}, kFactor{1e-6, 1e6},
    kDeviation{1e-12, 100};

class Reader {
public:
    Reader(const json& config, const std::string& where) : config_(config), where_(where) {}

    [[noreturn]] void refuse(std::string_view key, std::string what, const json& value,
                             std::string limit, std::string remedy = {}) const {
        throw Error(Trouble::usage, {.what = std::move(what),
                                     .where = where_ + ": " + std::string(key),
                                     .measured = shown_json(value),
                                     .limit = std::move(limit),
                                     .remedy = std::move(remedy)});
    }

    // Null where the key is absent or null.
    const json& at(std::string_view key) const {
        static const json kNone;
        const auto found = config_.find(key);
        return found == config_.end() ? kNone : *found;
    }
    bool has(std::string_view key) const { return config_.contains(key); }
    const std::string& where() const { return where_; }
    int64_t integer(std::string_view key, int64_t otherwise, int64_t most = 1 << 30) const {
        const json& value = at(key);
        if (value.is_null() && otherwise > 0) return otherwise;
        if (!value.is_number_integer() || value.get<double>() < 1 ||
            value.get<double>() > static_cast<double>(most))
            refuse(key, "a size is missing or out of range", value,
                   "an integer of 1 to " + std::to_string(most));
        return value.get<int64_t>();
    }
    double number(std::string_view key, double otherwise, const Between& range = kAnyScale) const {
        const json& value = at(key);
        if (value.is_null() && otherwise > 0) return otherwise;
        if (!is_in(value, range))
            refuse(key, "a number is missing or out of range", value, "a number" + text_of(range));
        return value.get<double>();
    }
    double number_or_zero(std::string_view key, double otherwise, const Between& range) const {
        return at(key) == 0 ? 0 : number(key, otherwise, range);
    }
    std::vector<double> numbers(std::string_view key, int64_t count, const Between& range) const {
        const json& list = at(key);
        std::vector<double> found;
        for (const json& value : list.is_array() ? list : json::array()) {
            if (is_in(value, range)) found.push_back(value.get<double>());
        }
        if (!list.is_array() || std::ssize(list) != count || std::ssize(found) != count)
            refuse(key, "a list is missing, too short or too long, or holds something else", list,
                   std::to_string(count) + " numbers" + text_of(range));
        return found;
    }
    bool flag(std::string_view key, bool otherwise) const {
        const json& value = at(key);
        if (value.is_null()) return otherwise;
        if (!value.is_boolean()) refuse(key, "wrong type of value", value, "true or false");
        return value.get<bool>();
    }
    bool biased(Bias bias, std::string_view key) const {
        return bias == Bias::asked ? flag(key, false) : bias == Bias::always;
    }
    void demand(const Demand& demand) const {
        const json& value = at(demand.key);
        if (value.is_null()) return;
        std::string known;
        for (const std::string_view one : demand.values) {
            if (one.empty()) continue;
            if (value.dump() == one) return;
            known.append(known.empty() ? "" : ", ").append(one);
        }
        refuse(demand.key, "an option that ferry does not support", value, "supported: " + known);
    }

private:
    static bool is_in(const json& value, const Between& range) {
        const double number = value.is_number() ? value.get<double>() : 0;
        return number >= range.low && number <= range.high;
    }
    static std::string text_of(const Between& range) {
        std::ostringstream text;
        text << " of " << range.low << " to " << range.high;
        return text.str();
    }

    const json& config_;
    const std::string& where_;
};

const Keys& keys_of(const Reader& in) {
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
std::vector<bool> sliding_layers(const Reader& in, int64_t layers) {
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
void check_nothing_slides(const Reader& in, const std::vector<bool>& slides, bool off) {
    if (std::ranges::find(slides, true) == slides.end()) return;
    in.refuse("layer_types", "layers are to slide, and no window says how far",
              in.at("layer_types"),
              off ? "use_sliding_window true, and sliding_window a number of tokens"
                  : "sliding_window a number of tokens",
              off ? "set use_sliding_window to true, or these layers to \"full_attention\""
                  : "set sliding_window, or these layers to \"full_attention\"");
}

// The windows of the blocks: those that slide, by the list of layer types or by the older rule.
std::vector<int64_t> windows_of(const Reader& in, Window rule, int64_t layers) {
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

double yarn_amplitude(const Reader& in, double factor) {
    const auto amplitude = [factor](double scale) {
        return factor <= 1 ? 1.0 : 0.1 * scale * std::log(factor) + 1;
    };
    if (!in.at("attention_factor").is_null()) return in.number("attention_factor", 0);
    const bool both = in.at("mscale").is_number() && in.at("mscale_all_dim").is_number() &&
                      in.at("mscale") != 0 && in.at("mscale_all_dim") != 0;
    if (!both) return amplitude(1);
    return amplitude(in.number("mscale", 0)) / amplitude(in.number("mscale_all_dim", 0));
}

double longrope_amplitude(const Reader& in, const RopeScaling& s) {
    if (!in.at("attention_factor").is_null()) return in.number("attention_factor", 0);
    return s.factor <= 1 ? 1 : std::sqrt(1 + std::log(s.factor) / std::log(s.original_positions));
}

RopeScaling::Kind scaling_from(const Reader& in) {
    using enum RopeScaling::Kind;
    constexpr std::pair<std::string_view, RopeScaling::Kind> kKinds[] = {
        {"default", none},
        {"linear", linear},
        {"dynamic", dynamic},
        {"llama3", llama3},
        {"yarn", yarn},
        {"longrope", longrope},
        {"proportional", proportional}};
    const char* key = in.at("rope_type").is_null() ? "type" : "rope_type";
    const json& named = in.at(key);
    if (named.is_null()) return none;
    std::string known;
    for (const auto& [name, kind] : kKinds) {
        if (named == name) return kind;
        known.append(known.empty() ? "" : ", ").append(name);
    }
    in.refuse(key, "a scaling of RoPE that ferry does not support", named, "supported: " + known);
}

// The settings of RoPE, and the whole configuration around them, which may say the same.
struct RopeReader {
    const Reader &in, &around;
    int64_t context;

    // Some models keep it outside; then it holds.
    double original_positions() const {
        constexpr const char* kKey = "original_max_position_embeddings";
        const Reader& from = around.at(kKey).is_null() ? in : around;
        return static_cast<double>(from.integer(kKey, context));
    }

    // Null asks for how much longer than the original the context is; an absent key is an error.
    double derived_factor(double original) const {
        return in.has("factor") ? static_cast<double>(context) / original : 0;
    }

    // transformers' models of these families turn whole heads: what "default" is told of a part is
    // not looked at, and other scalings end in an error. Only "proportional" turns a part.
    double rotated(bool proportional) const {
        constexpr const char* kKey = "partial_rotary_factor";
        const Reader& from = in.at(kKey).is_null() ? around : in;
        if (from.at(kKey).is_null()) return 1;
        const double share = from.number(kKey, 0);
        if (share > 1 || (share < 1 && !proportional)) {
            from.refuse(kKey, "transformers' models of this family turn whole heads", from.at(kKey),
                        "1, or up to 1 with rope_type \"proportional\"",
                        "leave the key out if the weights were trained so");
        }
        return share;
    }

    void read(Shape& shape) const {
        using enum RopeScaling::Kind;
        RopeScaling& s = shape.rope_scaling;
        s.kind = scaling_from(in);
        s.rotated = rotated(s.kind == proportional);
        switch (s.kind) {
            case none:
                return;
            case linear:
                s.factor = in.number("factor", 0, kFactor);
                return;
            case proportional:
                s.factor = in.number("factor", 1, kFactor);
                return;
            case dynamic:
                s.factor = in.number("factor", 0, kFactor);
                s.original_positions = static_cast<double>(context);
                return;
            case llama3:
                s.factor = in.number("factor", 0, kFactor);
                s.original_positions = original_positions();
                s.low_frequency = in.number("low_freq_factor", 0);
                s.high_frequency = in.number("high_freq_factor", 0);
                return;
            case yarn:
                s.original_positions = original_positions();
                s.factor = in.number("factor", derived_factor(s.original_positions), kFactor);
                s.beta_fast = in.number("beta_fast", 32);
                s.beta_slow = in.number("beta_slow", 1);
                s.truncate = in.flag("truncate", true);
                s.amplitude = yarn_amplitude(in, s.factor);
                return;
            case longrope:
                s.original_positions = original_positions();
                s.factor = in.number("factor", static_cast<double>(context) / s.original_positions,
                                     kFactor);
                s.short_factors = in.numbers("short_factor", shape.head_dim / 2, kFactor);
                s.long_factors = in.numbers("long_factor", shape.head_dim / 2, kFactor);
                s.amplitude = longrope_amplitude(in, s);
                return;
        }
    }
};

// Both spellings in one file, as conversions leave them, must say the same: transformers' versions
// differ in which of them they take.
void check_spellings(const Reader& in) {
    const json &newer = in.at("rope_parameters"), &older = in.at("rope_scaling");
    if (!newer.is_object() || !older.is_object()) return;
    const auto settings = [](json found) {
        if (found.contains("type")) {
            const json type = found["type"];
            found.erase("type");
            if (!found.contains("rope_type")) found["rope_type"] = type;
        }
        found.erase("rope_theta");  // which lies outside the older one
        return found;
    };
    if (settings(newer) == settings(older)) return;
    in.refuse("rope_scaling", "RoPE is described twice, and not alike", older,
              "rope_parameters: " + shown_json(newer),
              "take the one that does not hold out of the file");
}

// Settings that each are allowed may still divide by zero: log(theta) or log(original) of 1.
void check_angles(const Reader& in, const char* key, int64_t context, const Shape& shape) {
    for (const int64_t sequence : {int64_t{1}, context}) {
        const RopeTable table = rope_table(shape, sequence);
        const auto finite = [](double value) { return std::isfinite(static_cast<float>(value)); };
        if (finite(table.amplitude) && std::ranges::all_of(table.frequencies, finite)) continue;
        in.refuse(key, "these settings of RoPE give no finite angles", in.at(key), "",
                  "check rope_theta, factor and original_max_position_embeddings");
    }
}

// rope_parameters as transformers 5 writes it, or rope_theta and rope_scaling as 4 did.
void read_rope(const Reader& in, const std::string& where, int64_t context, Shape& shape) {
    check_spellings(in);
    const bool newer = in.at("rope_parameters").is_object();
    const char* key = newer ? "rope_parameters" : "rope_scaling";
    const json& settings = in.at(key);
    if (!settings.is_null() && !settings.is_object())
        in.refuse(key, "wrong type of value", settings, "an object");
    shape.rope_theta = in.number("rope_theta", 10000, kTheta);
    const json given = settings.is_null() ? json::object() : settings;
    for (const auto& [name, value] : given.items()) {
        if (value.is_object())
            in.refuse(key, "RoPE that differs by the kind of layer", name, "one for all layers");
    }
    const std::string place = where + ": " + key;
    const Reader inner(given, place);
    if (newer) shape.rope_theta = inner.number("rope_theta", shape.rope_theta, kTheta);
    RopeReader{inner, in, context}.read(shape);
    check_angles(in, key, context, shape);
}

// As many as ferry's own configuration takes. A layer's work at start-up comes before its tensors
// are looked for.
constexpr int64_t kMostLayers = 65536;
// And of a head, whose elements have frequencies, all of them computed.
constexpr int64_t kMostHeadDim = 65536;

// In floating point: sizes that each are allowed may have a product that no integer holds.
void check_elements(const Reader& in, const Keys& keys, const Shape& s) {
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

void read_sizes(const Reader& in, const Keys& keys, Shape& s) {
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
int64_t padding_token(const Reader& in, int64_t vocab) {
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
void check_type(const Reader& in) {
    for (const char* key : {"dtype", "torch_dtype"}) {
        const json& type = in.at(key);
        if (!type.is_null() && !type.is_string())
            in.refuse(key, "the type of the weights is no name", type,
                      "one name, such as \"bfloat16\"", "leave the key out, or name the type");
    }
}

bool has_dropout(const Reader& in, const Keys& keys) {
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
    const Reader in(config, where);
    const Keys& keys = keys_of(in);
    for (const Demand& demand : keys.demands) in.demand(demand);
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
    s.qkv_bias = in.biased(keys.qkv_bias, "attention_bias");
    s.output_bias = in.biased(keys.output_bias, "attention_bias");
    s.mlp_bias = in.biased(keys.mlp_bias, "mlp_bias");
    s.head_norms = keys.head_norms;
    s.windows = windows_of(in, keys.window, s.layers);
    s.initial_deviation = in.number_or_zero("initializer_range", 0.02, kDeviation);
    s.smaller_residuals = keys.classic;
    // transformers' gpt2 has an embedding without padding.
    if (!keys.classic) s.padding_token = padding_token(in, s.vocab);
    if (keys.classic) {
        s.learned_positions = found.context;
    } else {
        read_rope(in, where, found.context, s);
        if (s.head_dim % 2 != 0)
            in.refuse("head_dim", "the elements of a head must be even: RoPE turns them in pairs",
                      s.head_dim, "an even number");
    }
    return found;
}

std::string_view optional_prefix(Family family) { return names_of(family).prefix; }

}  // namespace ferry::model
