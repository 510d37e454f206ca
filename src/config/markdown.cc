#include <cmath>
#include <cstdio>

#include "ferry/error.h"
#include "schema.h"

namespace ferry::config {
namespace {

std::string bytes_text(int64_t bytes) {
    return bytes == kUnlimited ? "unlimited" : format_bytes(bytes);
}

std::string default_text(const Key& key, Config& config) {
    if (key.required) return "required";
    const auto show = [&key, &config](auto* slot) -> std::string {
        const auto value = slot(config);
        using Field = std::remove_const_t<decltype(value)>;
        if constexpr (std::is_same_v<Field, Pair>) {
            return "`[" + format_number(*value.first) + ", " + format_number(*value.second) + "]`";
        } else if constexpr (std::is_same_v<Field, bool*>) {
            return *value ? "`true`" : "`false`";
        } else if constexpr (std::is_same_v<Field, std::string*>) {
            return "`" + *value + "`";
        } else if constexpr (std::is_same_v<Field, std::vector<std::string>*> ||
                             std::is_same_v<Field, std::vector<int>*> ||
                             std::is_same_v<Field, std::vector<NvmePath>*>) {
            return "`[]`";
        } else if (key.form == Form::bytes) {
            return "`" + bytes_text(static_cast<int64_t>(*value)) + "`";
        } else if (key.automatic && static_cast<double>(*value) == *key.automatic) {
            return "`auto`";
        } else {
            return "`" + format_number(static_cast<double>(*value)) + "`";
        }
    };
    return std::visit(show, key.slot);
}

std::string values_text(const Key& key) {
    std::string text;
    for (const std::string_view choice : key.choices)
        text += (text.empty() ? "`" : ", `") + std::string(choice) + "`";
    if (!text.empty()) return text;
    text = std::string(name_of(key.form));
    const std::string range = describe(key.range, key.form);
    return range.empty() ? text : text + ", " + range;
}

bool in_section(const Key& key, std::string_view section) {
    const size_t dot = key.path.find('.');
    return (dot == std::string_view::npos ? std::string_view() : key.path.substr(0, dot)) ==
           section;
}

constexpr std::string_view kIntroduction =
    R"(# Configuration

`ferry train CONFIG.json` reads one JSON file; `//` and `/* */` comments are allowed. Sections nest:
`model.hidden` is written `{"model": {"hidden": 256}}`. `--set key=value` replaces a value on the
command line: `--set steps=10 --set budgets.host=64MiB --set 'optimizer.betas=[0.9, 0.95]'`.

An unknown key, a wrong type or a value outside its range ends the program with code 2 and one
message that names the key, what was found and what is allowed. A size is a number of bytes or text
with a unit (`512MiB`, `2GB`), or `unlimited`. Relative paths start at the working directory.

This page is printed from the table in `src/config/schema.cc`; a test keeps them equal.
)";

}  // namespace

std::string format_number(double value) {
    char text[32];
    const bool whole = value == std::floor(value) && std::abs(value) < 1e15;
    std::snprintf(text, sizeof text, whole ? "%.0f" : "%.6g", value);
    return text;
}

std::string_view name_of(Form form) {
    switch (form) {
        case Form::integer:
            return "whole number";
        case Form::number:
            return "number";
        case Form::boolean:
            return "`true` or `false`";
        case Form::text:
            return "text";
        case Form::choice:
            return "one of its words";
        case Form::bytes:
            return "size";
        case Form::pair:
            return "list of two numbers";
        case Form::integers:
            return "list of whole numbers";
        case Form::texts:
            return "list of texts";
        case Form::volumes:
            return "list of volumes";
    }
    bug("unknown form");
}

std::string describe(const Range& range, Form form) {
    // An end this far out is none that a user meets.
    constexpr double kFar = 1e12;
    if (range.low == range.high) return {};
    const auto number = [form](double value) {
        return form == Form::bytes ? format_bytes(static_cast<int64_t>(value))
                                   : format_number(value);
    };
    std::string text = (range.above_low ? "above " : "at least ") + number(range.low);
    if (range.high < kFar)
        text += (range.below_high ? ", below " : ", at most ") + number(range.high);
    return text;
}

}  // namespace ferry::config

namespace ferry {

std::string describe_config_markdown() {
    Config defaults;
    std::string page(config::kIntroduction);
    for (const config::Section& section : config::sections()) {
        const std::string title =
            section.name.empty() ? "Top level" : "`" + std::string(section.name) + "`";
        page += "\n## " + title + "\n\n" + std::string(section.doc) +
                "\n\n| key | value | default | meaning |\n|---|---|---|---|\n";
        for (const config::Key& key : config::schema()) {
            if (!config::in_section(key, section.name)) continue;
            const std::string_view name = key.path.substr(key.path.find('.') + 1);
            page += "| `" + std::string(name) + "` | " + config::values_text(key) + " | " +
                    config::default_text(key, defaults) + " | " + std::string(key.doc) + " |\n";
        }
    }
    return page;
}

}  // namespace ferry
