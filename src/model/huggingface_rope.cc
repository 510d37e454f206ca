#include "huggingface_rope.h"

#include <algorithm>
#include <cmath>
#include <utility>

namespace ferry::model {
namespace {

using nlohmann::json;

constexpr Between kTheta{1, 1e15}, kFactor{1e-6, 1e6};

double yarn_amplitude(const JsonKeys& in, double factor) {
    const auto amplitude = [factor](double scale) {
        return factor <= 1 ? 1.0 : 0.1 * scale * std::log(factor) + 1;
    };
    if (!in.at("attention_factor").is_null()) return in.number("attention_factor", 0);
    const bool both = in.at("mscale").is_number() && in.at("mscale_all_dim").is_number() &&
                      in.at("mscale") != 0 && in.at("mscale_all_dim") != 0;
    if (!both) return amplitude(1);
    return amplitude(in.number("mscale", 0)) / amplitude(in.number("mscale_all_dim", 0));
}

double longrope_amplitude(const JsonKeys& in, const RopeScaling& s) {
    if (!in.at("attention_factor").is_null()) return in.number("attention_factor", 0);
    return s.factor <= 1 ? 1 : std::sqrt(1 + std::log(s.factor) / std::log(s.original_positions));
}

RopeScaling::Kind scaling_from(const JsonKeys& in) {
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
    const JsonKeys &in, &around;
    int64_t context;

    // Some models keep it outside; then it holds.
    double original_positions() const {
        constexpr const char* kKey = "original_max_position_embeddings";
        const JsonKeys& from = around.at(kKey).is_null() ? in : around;
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
        const JsonKeys& from = in.at(kKey).is_null() ? around : in;
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
void check_spellings(const JsonKeys& in) {
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
void check_angles(const JsonKeys& in, const char* key, int64_t context, const Shape& shape) {
    for (const int64_t sequence : {int64_t{1}, context}) {
        const RopeTable table = rope_table(shape, sequence);
        const auto finite = [](double value) { return std::isfinite(static_cast<float>(value)); };
        if (finite(table.amplitude) && std::ranges::all_of(table.frequencies, finite)) continue;
        in.refuse(key, "these settings of RoPE give no finite angles", in.at(key), "",
                  "check rope_theta, factor and original_max_position_embeddings");
    }
}

}  // namespace

void read_rope(const JsonKeys& in, int64_t context, Shape& shape) {
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
    const std::string place = in.where() + ": " + key;
    const JsonKeys inner(given, place);
    if (newer) shape.rope_theta = inner.number("rope_theta", shape.rope_theta, kTheta);
    RopeReader{inner, in, context}.read(shape);
    check_angles(in, key, context, shape);
}

}  // namespace ferry::model
