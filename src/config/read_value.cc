#include "read_value.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <nlohmann/json.hpp>
#include <type_traits>

#include "base/json_reader.h"
#include "base/words.h"
#include "ferry/error.h"

namespace ferry::config {
namespace {

using nlohmann::json;

struct Place {
    const Key& key;
    const std::string& where;
};

std::string wanted(const Key& key) {
    std::string text = "wanted " + std::string(name_of(key.form));
    if (key.automatic) text += " or \"auto\"";
    return text;
}

[[noreturn]] void wrong_type(
    const Place& at, const json& found,
    std::string remedy = "docs/configuration.md says what each key takes") {
    throw Error(Trouble::usage, {.what = "wrong type of value",
                                 .where = at.where,
                                 .measured = describe(found),
                                 .limit = wanted(at.key),
                                 .remedy = std::move(remedy)});
}

// "write 1 instead": the end of the range that the value is beyond, where it belongs to the range.
std::string nearest_end(const Range& range, const json& found) {
    if (!range.remedy.empty()) return std::string(range.remedy);
    const bool low = found.is_number() && found.get<double>() <= range.low;
    if (low ? range.above_low : range.below_high) return "choose a value inside the range";
    return "the nearest value allowed is " + format_number(low ? range.low : range.high);
}

// The documentation leaves out an upper end that no user meets; who went beyond it has to know.
std::string limit_for(const Key& key, const json& found) {
    const bool beyond = found.is_number() && found.get<double>() > key.range.high;
    return beyond ? "at most " + format_number(key.range.high) : describe(key.range, key.form);
}

[[noreturn]] void out_of_range(const Place& at, const json& found) {
    throw Error(Trouble::usage, {.what = "value outside its range",
                                 .where = at.where,
                                 .measured = shown_json(found),
                                 .limit = limit_for(at.key, found),
                                 .remedy = nearest_end(at.key.range, found)});
}

bool inside(const Range& range, double value) {
    const bool high_enough = range.above_low ? value > range.low : value >= range.low;
    const bool low_enough = range.below_high ? value < range.high : value <= range.high;
    return high_enough && low_enough;
}

double read_number(const Place& at, const json& value) {
    if (!value.is_number()) wrong_type(at, value);
    const double number = value.get<double>();
    if (!inside(at.key.range, number)) out_of_range(at, value);
    return number;
}

// The range's ends are exact in double, and so is every integer inside it; a whole number written
// as 1e6 is one too.
int64_t read_integer(const Place& at, const json& value) {
    if (!value.is_number()) wrong_type(at, value);
    const double number = value.get<double>();
    if (number != std::floor(number)) wrong_type(at, value);
    if (!inside(at.key.range, number)) out_of_range(at, value);
    return value.is_number_integer() ? value.get<int64_t>() : static_cast<int64_t>(number);
}

int64_t read_bytes(const Place& at, const json& value) {
    if (value == "unlimited") return kUnlimited;
    if (!value.is_string()) return read_integer(at, value);
    const int64_t bytes = parse_bytes(value.get_ref<const std::string&>(), at.where);
    if (!inside(at.key.range, static_cast<double>(bytes))) out_of_range(at, value);
    return bytes;
}

std::string read_text(const Place& at, const json& value) {
    if (!value.is_string()) wrong_type(at, value);
    if (value.get_ref<const std::string&>().empty()) {
        throw Error(Trouble::usage, {.what = "a text without a character",
                                     .where = at.where,
                                     .measured = describe(value),
                                     .remedy = "give it a value, or leave the key out"});
    }
    return value.get<std::string>();
}

// The index of the word among the key's.
size_t read_choice(const Place& at, const json& value, const Choice& choice) {
    const std::string word = read_text(at, value);
    std::string all;
    std::vector<std::string> known;
    for (size_t i = 0; i < choice.count; ++i) {
        if (choice.word(i) == word) return i;
        all += (all.empty() ? "" : ", ") + std::string(choice.word(i));
        known.emplace_back(choice.word(i));
    }
    const std::string near = nearest_word(word, known);
    throw Error(Trouble::usage,
                {.what = "unknown value",
                 .where = at.where,
                 .measured = describe(value),
                 .limit = "one of " + all,
                 .remedy = near.empty() ? "choose one of them" : "did you mean \"" + near + "\"?"});
}

std::vector<std::string> read_texts(const Place& at, const json& value) {
    if (!value.is_array()) wrong_type(at, value);
    std::vector<std::string> texts;
    for (const json& item : value) texts.push_back(read_text(at, item));
    return texts;
}

NvmePath read_volume(const Place& at, const json& value) {
    if (value.is_string()) return {.path = read_text(at, value)};
    if (!value.is_object()) wrong_type(at, value);
    static const Key kPath{"path", {}, Form::text, {}};
    static const Key kSize{
        "size", {}, Form::bytes, "bytes ferry may use there", {.low = 1, .high = 9e18}};
    static const Key kEndurance{
        "endurance_tbw", {}, Form::number, "terabytes written", {.low = 0, .high = 1e9}};
    NvmePath volume;
    for (const auto& [name, item] : value.items()) {
        const std::string where = at.where + "." + shown(name);
        if (name == "path") {
            volume.path = read_text({kPath, where}, item);
        } else if (name == "size") {
            volume.size_bytes = read_bytes({kSize, where}, item);
        } else if (name == "endurance_tbw") {
            volume.endurance_tbw = read_number({kEndurance, where}, item);
        } else {
            const std::vector<std::string> known = {"path", "size", "endurance_tbw"};
            const std::string near = nearest_word(name, known);
            throw Error(
                Trouble::usage,
                {.what = "unknown key",
                 .where = where,
                 .limit = "an NVMe volume has \"path\", \"size\" and \"endurance_tbw\"",
                 .remedy = near.empty() ? "choose one of them" : "did you mean \"" + near + "\"?"});
        }
    }
    if (volume.path.empty()) {
        throw Error(Trouble::usage, {.what = "required key is missing",
                                     .where = at.where + ".path",
                                     .remedy = "name a directory on an NVMe file system"});
    }
    return volume;
}

std::vector<NvmePath> read_volumes(const Place& at, const json& value) {
    if (!value.is_array()) wrong_type(at, value);
    std::vector<NvmePath> volumes;
    for (const json& item : value) {
        const std::string where = at.where + "[" + std::to_string(volumes.size()) + "]";
        volumes.push_back(read_volume({at.key, where}, item));
    }
    return volumes;
}

[[noreturn]] void no_period(const Place& at, const json& found) {
    throw Error(Trouble::usage, {.what = "neither a number of steps nor a time",
                                 .where = at.where,
                                 .measured = describe(found),
                                 .limit = "at least 1 step or 1 second; 0: never",
                                 .remedy = "write 100 for steps, or \"30s\", \"10min\", \"2h\""});
}

// A number is of steps, with or without quotes; a time has its unit.
Period read_period(const Place& at, const json& value) {
    if (value.is_number()) return {.steps = read_integer(at, value)};
    if (!value.is_string()) wrong_type(at, value);
    const auto& text = value.get_ref<const std::string&>();
    constexpr std::array<std::pair<std::string_view, double>, 4> kUnits{
        {{"", 0}, {"s", 1}, {"min", 60}, {"h", 3600}}};
    double number = 0;
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
    std::string_view unit(end, static_cast<size_t>(text.data() + text.size() - end));
    while (unit.starts_with(' ')) unit.remove_prefix(1);
    const auto* known =
        std::ranges::find(kUnits, unit, &std::pair<std::string_view, double>::first);
    if (error != std::errc() || known == kUnits.end() || !inside(at.key.range, number))
        no_period(at, value);
    if (unit.empty() && number != std::floor(number)) no_period(at, value);
    if (unit.empty()) return {.steps = static_cast<int64_t>(number)};
    const double seconds = number * known->second;
    if (seconds < 1) no_period(at, value);
    return {.seconds = seconds};
}

std::vector<int> read_integers(const Place& at, const json& value) {
    if (!value.is_array()) wrong_type(at, value);
    std::vector<int> numbers;
    for (const json& item : value) numbers.push_back(static_cast<int>(read_integer(at, item)));
    return numbers;
}

void read_pair(const Place& at, const json& value, Pair out) {
    if (!value.is_array() || value.size() != 2) wrong_type(at, value);
    *out.first = read_number(at, value[0]);
    *out.second = read_number(at, value[1]);
}

void read_triple(const Place& at, const json& value, Triple out) {
    if (!value.is_array() || value.size() != 3) wrong_type(at, value);
    *out.first = read_number(at, value[0]);
    *out.second = read_number(at, value[1]);
    *out.third = read_number(at, value[2]);
}

bool says_automatic(const Key& key, const json& value) { return key.automatic && value == "auto"; }

template <class Field>
void read_number_field(const Place& at, const json& value, Field* field) {
    if constexpr (std::is_same_v<Field, double>) {
        *field = read_number(at, value);
    } else {
        *field = static_cast<Field>(at.key.form == Form::bytes ? read_bytes(at, value)
                                                               : read_integer(at, value));
    }
}

template <class Field>
void read_field(const Place& at, const json& value, std::optional<Field>* field) {
    field->reset();
    if (!says_automatic(at.key, value)) read_number_field(at, value, &field->emplace());
}

template <class Field>
void read_field(const Place& at, const json& value, Field* field) {
    if constexpr (std::is_same_v<Field, bool>) {
        if (!value.is_boolean()) wrong_type(at, value, "write true or false, without quotes");
        *field = value.get<bool>();
    } else if constexpr (std::is_same_v<Field, std::string>) {
        *field = read_text(at, value);
    } else if constexpr (std::is_same_v<Field, std::vector<std::string>>) {
        *field = read_texts(at, value);
    } else if constexpr (std::is_same_v<Field, std::vector<int>>) {
        *field = read_integers(at, value);
    } else if constexpr (std::is_same_v<Field, Period>) {
        *field = read_period(at, value);
    } else if constexpr (std::is_same_v<Field, std::vector<NvmePath>>) {
        *field = read_volumes(at, value);
    } else if (says_automatic(at.key, value)) {
        *field = {};
    } else {
        read_number_field(at, value, field);
    }
}

}  // namespace

std::string describe(const json& value) {
    constexpr size_t kOfAValue = 80;
    const std::string text = shown_json(value, kOfAValue);
    const std::string type = value.is_string() ? "text" : value.type_name();
    return value.is_null() ? type : type + " " + text;
}

void read_value(const Key& key, const json& value, const std::string& where, Config& config) {
    const Place at{key, where};
    const auto read = [&](const auto& slot) {
        if constexpr (std::is_same_v<std::remove_cvref_t<decltype(slot)>, Choice>) {
            slot.write(config, read_choice(at, value, slot));
        } else {
            const auto target = slot(config);
            if constexpr (std::is_same_v<std::remove_const_t<decltype(target)>, Pair>) {
                read_pair(at, value, target);
            } else if constexpr (std::is_same_v<std::remove_const_t<decltype(target)>, Triple>) {
                read_triple(at, value, target);
            } else {
                read_field(at, value, target);
            }
        }
    };
    std::visit(read, key.slot);
}

}  // namespace ferry::config
