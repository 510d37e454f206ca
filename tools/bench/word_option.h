// Options that take one of a few words, those of the configuration: what is stored is the value
// that a word stands for.
#pragma once

#include <CLI/CLI.hpp>
#include <algorithm>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include "config/words.h"

namespace ferry::tools {

inline constexpr const auto& kDeviceWords = config::kDevices;
inline constexpr const auto& kTypeWords = config::kPrecisions;
inline constexpr const auto& kBackendWords = config::kBackends;
// The methods that a processor's team updates with, element by element.
inline constexpr config::Words<optim::Method, 5> kMethodWords{
    {{optim::Method::adamw, "adamw"},
     {optim::Method::adam, "adam"},
     {optim::Method::sgd, "sgd"},
     {optim::Method::lion, "lion"},
     {optim::Method::adagrad, "adagrad"}}};

template <class Value, size_t count>
Value value_of(const config::Words<Value, count>& words, std::string_view text) {
    return std::ranges::find(words, text, &config::Word<Value>::text)->value;
}
template <class Value, size_t count>
std::string spelled(const config::Words<Value, count>& words, Value value) {
    return std::string(config::word_of(words, value));
}
template <class Value, size_t count>
CLI::Validator one_of(const config::Words<Value, count>& words) {
    std::vector<std::string> known;
    for (const config::Word<Value>& word : words) known.emplace_back(word.text);
    return CLI::IsMember(known);
}

// `target`: a value, which --help shows as the default, or an optional one. `words` and it must
// outlive the command.
template <class Target, class Value, size_t count>
CLI::Option* add_word_option(CLI::App& command, const std::string& name, Target& target,
                             const config::Words<Value, count>& words, const std::string& what) {
    const auto take = [&target, &words](const std::string& text) {
        target = value_of(words, text);
    };
    CLI::Option* option =
        command.add_option_function<std::string>(name, take, what)->check(one_of(words));
    if constexpr (std::is_same_v<Target, Value>) option->default_str(spelled(words, target));
    return option;
}

// Several of them, or "all". What is given stands in place of what `values` has.
template <class Value, size_t count>
CLI::Option* add_words_option(CLI::App& command, const std::string& name,
                              std::vector<Value>& values, const config::Words<Value, count>& words,
                              const std::string& what) {
    const auto take = [&values, &words](const std::vector<std::string>& texts) {
        values.clear();
        for (const std::string& text : texts) {
            for (const config::Word<Value>& word : words) {
                if (text == "all" || text == word.text) values.push_back(word.value);
            }
        }
    };
    std::vector<std::string> known{"all"};
    for (const config::Word<Value>& word : words) known.emplace_back(word.text);
    return command.add_option_function<std::vector<std::string>>(name, take, what)
        ->check(CLI::IsMember(known));
}

}  // namespace ferry::tools
