#include "ferry/config.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <set>

#include "base/json_reader.h"
#include "base/words.h"
#include "checks.h"
#include "read_value.h"
#include "schema.h"

namespace ferry {
namespace {

using config::Form;
using config::Key;
using nlohmann::json;

// A section, or a group of keys in one, as "checkpoint.keep".
bool is_section(std::string_view path) {
    const auto sections = config::sections();
    return std::any_of(sections.begin(), sections.end(),
                       [path](const config::Section& section) { return section.name == path; }) ||
           std::ranges::any_of(config::schema(), [path](const Key& key) {
               return key.path.starts_with(std::string(path) + ".");
           });
}

std::string_view last_part(std::string_view path) { return path.substr(path.rfind('.') + 1); }

std::string suggestion(std::string_view path) {
    const std::string_view name = last_part(path);
    const std::string_view section = path.substr(0, path.size() - name.size());
    std::vector<std::string> siblings, all, names;
    for (const Key& key : config::schema()) {
        if (path.starts_with(std::string(key.path) + ".")) return std::string(key.path);
        all.emplace_back(key.path);
        const std::string_view own = last_part(key.path);
        names.emplace_back(own);
        if (key.path.substr(0, key.path.size() - own.size()) == section) siblings.emplace_back(own);
    }
    // The right word in the wrong place: "lr" for "optimizer.lr".
    const auto named = [&](const std::string& word) {
        return all[static_cast<size_t>(std::ranges::find(names, word) - names.begin())];
    };
    if (std::ranges::find(names, name) != names.end()) return named(std::string(name));
    if (section.empty()) {
        for (const config::Section& each : config::sections()) siblings.emplace_back(each.name);
    }
    const std::string near = nearest_word(name, siblings);
    if (!near.empty()) return std::string(section) + near;
    // A key of that section is wanted, and none is near: not one of another section either.
    if (!section.empty() && !siblings.empty()) return "";
    const std::string word = nearest_word(name, names);
    std::string whole = nearest_word(path, all);
    return whole.empty() && !word.empty() ? named(word) : whole;
}

// Where no word is near: all keys of the section, or the nearest there is.
std::string nearest_keys(std::string_view path) {
    const std::string section(path.substr(0, path.find('.')));
    std::vector<std::string> all;
    std::string siblings;
    for (const Key& key : config::schema()) {
        all.emplace_back(key.path);
        if (section.size() < path.size() && key.path.starts_with(section + "."))
            siblings += (siblings.empty() ? "" : ", ") + std::string(last_part(key.path));
    }
    return siblings.empty() ? "the nearest is \"" + nearest_word(path, all, true) +
                                  "\"; docs/configuration.md lists every key"
                            : "the keys of \"" + section + "\" are " + siblings;
}

[[noreturn]] void unknown_key(const std::string& where, const std::string& path) {
    const std::string near = suggestion(path);
    throw Error(Trouble::usage,
                {.what = "unknown key " + in_quotes(path),
                 .where = where,
                 .remedy = near.empty() ? nearest_keys(path) : "did you mean \"" + near + "\"?"});
}

// As "model.hidden", and in "model" too: JSON's own keys differ.
[[noreturn]] void given_twice(const std::string& where, const std::string& path) {
    throw Error(Trouble::usage, {.what = "the key \"" + path + "\" is given twice",
                                 .where = where,
                                 .remedy = "remove one of them"});
}

// Reads a value, or a section's values, into the configuration and notes the keys it gave.
class Reader {
public:
    Reader(Config& config, config::GivenKeys& given) : config_(config), given_(given) {}

    // Values read from here on may give keys that were given before, once each.
    void begin_layer() { seen_.clear(); }

    void read(const std::string& where, const std::string& path, const json& value) {
        if (const Key* key = config::find_key(path)) {
            if (!seen_.insert(path).second) given_twice(where, path);
            given_.keys[key->path] = where;
            config::read_value(*key, value, where + ": " + path, config_);
            return;
        }
        if (!is_section(path)) unknown_key(where, path);
        if (!value.is_object()) {
            throw Error(Trouble::usage, {.what = "wrong type of value",
                                         .where = path.empty() ? where : where + ": " + path,
                                         .measured = config::describe(value),
                                         .limit = "wanted an object of keys: {...}",
                                         .remedy = "see docs/configuration.md"});
        }
        for (const auto& [name, item] : value.items())
            read(where, path.empty() ? name : path + "." + name, item);
    }

private:
    Config& config_;
    config::GivenKeys& given_;
    std::set<std::string> seen_{};  // keys, of the file or of all overrides
};

// The value of `--set key=value`: JSON where it is JSON, else text, so that neither 24MiB nor a
// path needs quotes within the shell's quotes.
json override_value(const std::string& path, const std::string& text) {
    const Key* key = config::find_key(path);
    const bool words = key && (key->form == Form::text || key->form == Form::choice);
    if (words && !text.starts_with('"')) return text;
    const JsonSource source{.where = "--set " + shown(path)};
    // Text that begins as a list or an object is one: its fault is named, not taken for text.
    if (text.starts_with('{') || text.starts_with('[')) return parse_json(text, source);
    return parse_json_if_it_is(text, source).value_or(json(text));
}

void read_override(Reader& reader, const std::string& text) {
    const size_t equals = text.find('=');
    const std::string where = "--set " + shown(text);
    if (equals == std::string::npos || equals == 0) {
        throw Error(Trouble::usage,
                    {.what = "not an override",
                     .where = where,
                     .remedy = "write --set key=value, such as --set batch.sequence=64"});
    }
    const std::string path = text.substr(0, equals);
    reader.read(where, path, override_value(path, text.substr(equals + 1)));
}

void demand_required(const Config& config, const config::GivenKeys& given) {
    for (const Key& key : config::schema()) {
        const bool of_shape = key.path.starts_with("model.");
        if (!key.required || given.contains(key.path)) continue;
        if (of_shape && !config.model.path.empty()) continue;
        throw Error(Trouble::usage, {.what = "required key is missing",
                                     .where = given.place_of(key.path),
                                     .remedy = "give it: " + std::string(key.doc)});
    }
}

}  // namespace

namespace {

config::GivenKeys read_all(Config& into, std::string_view text, const std::string& where,
                           std::span<const std::string> overrides) {
    config::GivenKeys given{.file = where};
    Reader reader(into, given);
    reader.read(where, "",
                parse_json(text, {.where = where,
                                  .remedy = "correct it there; comments are allowed",
                                  .comments = true}));
    reader.begin_layer();
    for (const std::string& each : overrides) read_override(reader, each);
    return given;
}

std::string file_text(const std::string& path) {
    return read_text_file(path, {.name = "the configuration",
                                 .remedy = "examples/quickstart.json is one to start from"});
}

}  // namespace

Config parse_config(std::string_view text, const std::string& where,
                    std::span<const std::string> overrides) {
    Config result;
    const config::GivenKeys given = read_all(result, text, where, overrides);
    demand_required(result, given);
    config::resolve_defaults(result, given);
    return result;
}

void set_value(Config& config, const std::string& override) {
    config::GivenKeys given;
    Reader reader(config, given);
    read_override(reader, override);
}

Config load_config(const std::string& path, std::span<const std::string> overrides) {
    return parse_config(file_text(path), path, overrides);
}

std::vector<std::string> given_keys(const std::string& path,
                                    std::span<const std::string> overrides) {
    Config scratch;
    std::vector<std::string> found;
    for (const auto& [key, place] : read_all(scratch, file_text(path), path, overrides).keys)
        found.emplace_back(key);
    return found;
}

}  // namespace ferry
