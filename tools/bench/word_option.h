// Options that take one of a few words: what is stored is the value that a word stands for.
#pragma once

#include <CLI/CLI.hpp>
#include <algorithm>
#include <array>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include "ferry/aio.h"
#include "ferry/config.h"

namespace ferry::tools {

template <class Value>
struct Word {
    std::string_view text;
    Value value;
};
template <class Value, size_t count>
using Words = std::array<Word<Value>, count>;

constexpr Words<DeviceKind, 2> kDeviceWords{{{"cpu", DeviceKind::cpu}, {"cuda", DeviceKind::cuda}}};
constexpr Words<DType, 3> kTypeWords{
    {{"bf16", DType::bf16}, {"fp16", DType::f16}, {"fp32", DType::f32}}};
constexpr Words<aio::BackendKind, 3> kBackendWords{{{"auto", aio::BackendKind::automatic},
                                                    {"uring", aio::BackendKind::uring},
                                                    {"posix", aio::BackendKind::posix}}};

template <class Value, size_t count>
std::string word_of(const Words<Value, count>& words, Value value) {
    return std::string(std::ranges::find(words, value, &Word<Value>::value)->text);
}
template <class Value, size_t count>
Value value_of(const Words<Value, count>& words, std::string_view text) {
    return std::ranges::find(words, text, &Word<Value>::text)->value;
}
template <class Value, size_t count>
CLI::Validator one_of(const Words<Value, count>& words) {
    std::vector<std::string> known;
    for (const Word<Value>& word : words) known.emplace_back(word.text);
    return CLI::IsMember(known);
}

// `target`: a value, which --help shows as the default, or an optional one. `words` and it must
// outlive the command.
template <class Target, class Value, size_t count>
CLI::Option* add_word_option(CLI::App& command, const std::string& name, Target& target,
                             const Words<Value, count>& words, const std::string& what) {
    const auto take = [&target, &words](const std::string& text) {
        target = value_of(words, text);
    };
    CLI::Option* option =
        command.add_option_function<std::string>(name, take, what)->check(one_of(words));
    if constexpr (std::is_same_v<Target, Value>) option->default_str(word_of(words, target));
    return option;
}

}  // namespace ferry::tools
