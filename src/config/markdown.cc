#include <spdlog/fmt/fmt.h>

#include <cmath>
#include <cstdio>

#include "ferry/error.h"
#include "markdown.h"
#include "schema.h"

namespace ferry::config {
namespace {

std::string bytes_text(int64_t bytes) {
    return bytes == kUnlimited ? "unlimited" : format_bytes(bytes);
}

std::string text_of(const Key&, const Pair& pair) {
    return fmt::format("[{}, {}]", format_number(*pair.first), format_number(*pair.second));
}
std::string text_of(const Key&, const Triple& triple) {
    return fmt::format("[{}, {}, {}]", format_number(*triple.first), format_number(*triple.second),
                       format_number(*triple.third));
}
std::string text_of(const Key&, const bool* value) { return *value ? "true" : "false"; }
std::string text_of(const Key&, const std::string* value) { return *value; }
std::string text_of(const Key&, const Period* period) { return describe(*period); }
std::string text_of(const Key&, const std::vector<std::string>* texts) {
    std::string all;
    for (const std::string& text : *texts)
        all.append(all.empty() ? "" : ", ").append("\"").append(text).append("\"");
    return "[" + all + "]";
}
template <class Item>
std::string text_of(const Key&, const std::vector<Item>*) {
    return "[]";
}
template <class Number>
std::string text_of(const Key& key, const Number* value) {
    if (key.form == Form::bytes) return bytes_text(static_cast<int64_t>(*value));
    return key.automatic ? "auto" : format_number(static_cast<double>(*value));
}
template <class Number>
std::string text_of(const Key&, const std::optional<Number>* value) {
    return value->has_value() ? format_number(static_cast<double>(**value)) : "auto";
}

std::string default_text(const Key& key, Config& config) {
    if (key.required) return "required";
    const auto show = [&](const auto& slot) -> std::string {
        if constexpr (std::is_same_v<std::remove_cvref_t<decltype(slot)>, Choice>) {
            return std::string(slot.word(slot.read(config)));
        } else {
            return text_of(key, slot(config));
        }
    };
    return fmt::format("`{}`", std::visit(show, key.slot));
}

std::string values_text(const Key& key) {
    std::string text;
    if (const auto* choice = std::get_if<Choice>(&key.slot)) {
        for (size_t i = 0; i < choice->count; ++i)
            text.append(text.empty() ? "`" : ", `").append(choice->word(i)).append("`");
        return text;
    }
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

`ferry train CONFIG.json` reads one JSON file. Most runs set these twelve keys:

| key | set it to |
|---|---|
)";

// The keys that people set, in the order in which they think of them.
struct Usual {
    std::string_view path;
    std::string_view advice;
};
constexpr Usual kUsual[] = {
    {"model.path", "the Hugging Face directory to start from; its `config.json` gives the shape"},
    {"data.tokens", "what `ferry data` wrote"},
    {"steps", "how many optimizer steps to take"},
    {"device", "`cuda` to train on the GPU"},
    {"precision", "`bf16` on a GPU from Ampere on"},
    {"batch.sequence", "tokens a sequence"},
    {"batch.micro_batch",
     "sequences a kernel sees at once: as many as make 8,192 tokens or more keep a GPU busy"},
    {"batch.micro_batches", "micro-batches a step; more tokens a step hide the moving of state"},
    {"optimizer.lr", "the peak learning rate; `schedule` has warm-up and fall"},
    {"budgets.device", "the device memory that ferry may hold"},
    {"budgets.host", "the host memory that ferry may hold"},
    {"budgets.nvme", "a directory on a drive, for what the other two have no room for"},
};

constexpr std::string_view kRecipes = R"(
`ferry plan CONFIG.json` then says where everything goes, what a step should take, and what more memory would bring.

## Three recipes

**Tune a model on one GPU, its state in host memory.** `budgets.device` may be far below what the model takes.

```json
{
    "model": {"path": "Llama-3.2-1B"},
    "data": {"tokens": "tokens.bin"},
    "steps": 1000,
    "device": "cuda",
    "precision": "bf16",
    "clip_norm": 1.0,
    "batch": {"sequence": 2048, "micro_batch": 4, "micro_batches": 4},
    "optimizer": {"lr": 1e-5, "betas": [0.9, 0.95], "weight_decay": 0.1},
    "schedule": {"kind": "cosine", "warmup_steps": 50},
    "budgets": {"device": "8GiB", "host": "24GiB"}
}
```

**The same where host memory is short.** A drive takes what is left over. The smaller formats of the state halve its
traffic. With `checkpoint.durable_steps` every step survives a kill.

```json
{
    "model": {"path": "Llama-3.2-1B"},
    "data": {"tokens": "tokens.bin"},
    "steps": 1000,
    "device": "cuda",
    "precision": "bf16",
    "clip_norm": 1.0,
    "batch": {"sequence": 2048, "micro_batch": 4, "micro_batches": 16},
    "optimizer": {"lr": 1e-5, "moments": "bf16", "master": "split"},
    "budgets": {"device": "8GiB", "host": "8GiB", "nvme": [{"path": "/mnt/nvme0/ferry", "size": "100GiB"}]}
}
```

**A small model from nothing, on the processors.** The shape stands in the file, and tokens are bytes.
The text wants 170 KB or more: evaluation takes 8,192 tokens of its last twentieth.

```json
{
    "model": {"hidden": 256, "layers": 4, "heads": 8, "intermediate": 688},
    "data": {"tokens": "tokens.bin"},
    "steps": 500,
    "clip_norm": 1.0,
    "batch": {"sequence": 128, "micro_batch": 8, "micro_batches": 4},
    "optimizer": {"lr": 1e-3, "betas": [0.9, 0.95], "weight_decay": 0.1},
    "schedule": {"kind": "cosine", "warmup_steps": 20, "final_fraction": 0.1},
    "evaluate": {"every": 50, "micro_batches": 8}
}
```

## How a file is read

Sections nest: `model.hidden` is written `{"model": {"hidden": 256}}`. `//` and `/* */` comments are allowed.
`--set key=value` replaces a value on the command line: `--set steps=10 --set budgets.host=64MiB --set
'optimizer.betas=[0.9, 0.95]'`. Relative paths start at the working directory.

A size is a number of bytes or text with a unit (`512MiB`, `2GB`), or `unlimited`. `auto` lets ferry choose. A key that is
"part of the numerics record" decides how numbers are rounded: runs that differ in it end with different bits.

An unknown key, a wrong type or a value outside its range ends the program with code 2. The message names the key, what was
found and what is allowed.

This page is printed from the table in `src/config/schema.cc`; a test keeps them equal.
)";

std::string usual_keys() {
    std::string text;
    for (const Usual& key : kUsual) {
        FERRY_CHECK(find_key(key.path) != nullptr, "the page names a key that is not there");
        text += "| `" + std::string(key.path) + "` | " + std::string(key.advice) + " |\n";
    }
    return text;
}

}  // namespace

std::string format_number(double value) {
    char text[32];
    const bool whole = value == std::floor(value) && std::abs(value) < 1e15;
    std::snprintf(text, sizeof text, whole ? "%.0f" : "%.6g", value);
    return text;
}

std::string describe(const Period& period) {
    if (period.seconds == 0) return std::to_string(period.steps);
    return format_number(period.seconds) + "s";
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
        case Form::triple:
            return "list of three numbers";
        case Form::integers:
            return "list of whole numbers";
        case Form::texts:
            return "list of texts";
        case Form::volumes:
            return "list of volumes";
        case Form::period:
            return "steps, or text with a unit of time";
    }
    bug("unknown form");
}

std::string describe(const Range& range, Form form) {
    // An end this far out is none that a user meets.
    constexpr double kFar = 1e12;
    if (range.low == range.high || form == Form::period) return {};
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
    page += config::usual_keys() + std::string(config::kRecipes);
    for (const config::Section& section : config::sections()) {
        const std::string title =
            section.name.empty() ? "Top level" : fmt::format("`{}`", section.name);
        page += "\n## " + title + "\n\n" + std::string(section.doc) +
                "\n\n| key | value | default | meaning |\n|---|---|---|---|\n";
        for (const config::Key& key : config::schema()) {
            if (!config::in_section(key, section.name)) continue;
            const std::string_view name = key.path.substr(key.path.find('.') + 1);
            page += fmt::format("| `{}` | {} | {} | {} |\n", name, config::values_text(key),
                                config::default_text(key, defaults), key.doc);
        }
    }
    return page;
}

}  // namespace ferry
