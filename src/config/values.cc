// A whole configuration as text.
#include <spdlog/fmt/fmt.h>

#include "schema.h"

namespace ferry {
namespace {

using config::Key;

std::string text_of(double value) { return fmt::format("{}", value); }
std::string text_of(const std::string& value) { return value; }
std::string text_of(const NvmePath& path) {
    return fmt::format("{} ({} bytes, {} TB)", path.path, path.size_bytes, path.endurance_tbw);
}
template <class Value>
requires std::is_integral_v<Value> std::string text_of(Value value) {
    return fmt::format("{}", value);
}
std::string text_of(const Period& period) { return config::describe(period); }
template <class Value>
std::string text_of(const std::vector<Value>& values) {
    std::string text;
    for (const Value& value : values) text.append(text.empty() ? "" : ", ").append(text_of(value));
    return fmt::format("[{}]", text);
}
std::string text_of(const config::Pair& pair) {
    return fmt::format("[{}, {}]", text_of(*pair.first), text_of(*pair.second));
}

std::string text_of(const config::Triple& triple) {
    return fmt::format("[{}, {}, {}]", text_of(*triple.first), text_of(*triple.second),
                       text_of(*triple.third));
}

template <class Value>
std::string text_of(const std::optional<Value>& value) {
    return value ? text_of(*value) : "auto";
}

std::string value_of(const Key& key, Config& config) {
    const auto show = [&](const auto& slot) -> std::string {
        if constexpr (std::is_same_v<std::remove_cvref_t<decltype(slot)>, config::Choice>) {
            return std::string(slot.word(slot.read(config)));
        } else {
            const auto value = slot(config);
            using Value = std::remove_const_t<decltype(value)>;
            if constexpr (std::is_same_v<Value, config::Pair> ||
                          std::is_same_v<Value, config::Triple>) {
                return text_of(value);
            } else {
                return text_of(*value);
            }
        }
    };
    return std::visit(show, key.slot);
}

}  // namespace

std::vector<KeyValue> describe_values(const Config& config) {
    Config described = config;  // slots lead to where a value can be written, too
    std::vector<KeyValue> values;
    for (const Key& key : config::schema())
        values.push_back({std::string(key.path), value_of(key, described)});
    return values;
}

}  // namespace ferry
