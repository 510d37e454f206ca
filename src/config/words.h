// Every word that a configuration may hold, beside the value that it stands for: a table for each
// kind of choice. Reading, documentation, descriptions and errors go by these alone.
#pragma once

#include <array>
#include <optional>
#include <string_view>

#include "ferry/config.h"
#include "ferry/error.h"

namespace ferry::config {

template <class Value>
struct Word {
    Value value;
    std::string_view text;
};
template <class Value, size_t count>
using Words = std::array<Word<Value>, count>;

// clang-format off
constexpr Words<DeviceKind, 2> kDevices = {{
    {DeviceKind::cpu, name_of(DeviceKind::cpu)}, {DeviceKind::cuda, name_of(DeviceKind::cuda)}}};
constexpr Words<DType, 3> kPrecisions = {{
    {DType::f32, "fp32"}, {DType::bf16, "bf16"}, {DType::f16, "fp16"}}};
constexpr Words<DType, 2> kProducts = {{{DType::f32, "fp32"}, {DType::bf16, "bf16"}}};
constexpr Words<std::optional<DType>, 4> kNarrow = {{
    {std::nullopt, "auto"}, {DType::f32, "fp32"}, {DType::bf16, "bf16"}, {DType::f16, "fp16"}}};
constexpr Words<MomentType, 3> kMoments = {{
    {MomentType::f32, "fp32"}, {MomentType::bf16, "bf16"}, {MomentType::int8, "int8"}}};
constexpr Words<MasterFormat, 2> kMasters = {{
    {MasterFormat::fp32, "fp32"}, {MasterFormat::split, "split"}}};
constexpr Words<optim::Method, 8> kMethods = {{
    {optim::Method::adamw, "adamw"}, {optim::Method::adam, "adam"},
    {optim::Method::sgd, "sgd"}, {optim::Method::lion, "lion"},
    {optim::Method::adagrad, "adagrad"}, {optim::Method::muon, "muon"},
    {optim::Method::onebit_adam, "onebit_adam"}, {optim::Method::zeroone_adam, "zeroone_adam"}}};
constexpr Words<optim::AdjustLr, 3> kAdjustments = {{
    {optim::AdjustLr::original, "original"},
    {optim::AdjustLr::match_rms_adamw, "match_rms_adamw"},
    {optim::AdjustLr::spectral_unclamped, "spectral_unclamped"}}};
constexpr Words<optim::Decay, 6> kSchedules = {{
    {optim::Decay::constant, "constant"}, {optim::Decay::linear, "linear"},
    {optim::Decay::cosine, "cosine"}, {optim::Decay::wsd, "wsd"},
    {optim::Decay::one_cycle, "one_cycle"}, {optim::Decay::warmup_decay, "warmup_decay"}}};
constexpr Words<CodecKind, 3> kGradientCodecs = {{
    {CodecKind::none, "none"}, {CodecKind::int8, "int8"}, {CodecKind::int4, "int4"}}};
constexpr Words<CodecKind, 2> kWeightCodecs = {{
    {CodecKind::none, "none"}, {CodecKind::int8, "int8"}}};
constexpr Words<SecondShard, 2> kSecondShards = {{
    {SecondShard::none, "none"}, {SecondShard::host, "host"}}};
constexpr Words<AttentionKernels, 2> kAttentions = {{
    {AttentionKernels::best, "auto"}, {AttentionKernels::ferry, "ferry"}}};
constexpr Words<SequenceOrder, 3> kSequenceOrders = {{
    {SequenceOrder::automatic, "auto"}, {SequenceOrder::heads, "heads"},
    {SequenceOrder::ring, "ring"}}};
constexpr Words<PipelineSchedule, 5> kPipelineSchedules = {{
    {PipelineSchedule::automatic, "auto"},
    {PipelineSchedule::one_f_one_b, "1f1b"}, {PipelineSchedule::zero_bubble, "zero_bubble"},
    {PipelineSchedule::interleaved, "interleaved"},
    {PipelineSchedule::round_robin, "round_robin"}}};
constexpr Words<AttentionPattern, 8> kPatterns = {{
    {AttentionPattern::dense, "dense"}, {AttentionPattern::window, "window"},
    {AttentionPattern::fixed, "fixed"}, {AttentionPattern::bigbird, "bigbird"},
    {AttentionPattern::longformer, "longformer"}, {AttentionPattern::longformer, "bslongformer"},
    {AttentionPattern::variable, "variable"}, {AttentionPattern::layout, "layout"}}};
constexpr Words<AttentionDirection, 2> kDirections = {{
    {AttentionDirection::unidirectional, "unidirectional"},
    {AttentionDirection::bidirectional, "bidirectional"}}};
constexpr Words<OnNonfinite, 2> kNonfinite = {{
    {OnNonfinite::stop, "stop"}, {OnNonfinite::skip, "skip"}}};
constexpr Words<HashEvery, 2> kHashes = {{{HashEvery::end, "end"}, {HashEvery::step, "step"}}};
constexpr Words<UnsavedRun, 2> kUnsaved = {{
    {UnsavedRun::go_on, "go_on"}, {UnsavedRun::stop, "stop"}}};
constexpr Words<Speculate, 3> kSpeculate = {{
    {Speculate::automatic, "auto"}, {Speculate::off, "off"}, {Speculate::all, "all"}}};
constexpr Words<OnDoubt, 2> kDoubts = {{{OnDoubt::refuse, "refuse"}, {OnDoubt::ignore, "ignore"}}};
constexpr Words<aio::BackendKind, 3> kBackends = {{
    {aio::BackendKind::automatic, "auto"}, {aio::BackendKind::uring, "uring"}, {aio::BackendKind::posix, "posix"}}};
constexpr Words<aio::Leftover, 5> kLeftovers = {{
    {aio::Leftover::remove, "remove"}, {aio::Leftover::reuse, "reuse"}, {aio::Leftover::refuse, "refuse"},
    {aio::Leftover::remove_any, "remove_any"}, {aio::Leftover::reuse_any, "reuse_any"}}};
// clang-format on

// A value that has no word in the table is a bug.
template <class Value, size_t count>
size_t index_of(const Words<Value, count>& words, const Value& value) {
    for (size_t i = 0; i < count; ++i) {
        if (words[i].value == value) return i;
    }
    bug("a configuration holds a value that has no word");
}
template <class Value, size_t count>
std::string_view word_of(const Words<Value, count>& words, const Value& value) {
    return words[index_of(words, value)].text;
}

// None: no value has that word.
template <class Value, size_t count>
std::optional<Value> find_value(const Words<Value, count>& words, std::string_view text) {
    for (const Word<Value>& word : words) {
        if (word.text == text) return word.value;
    }
    return std::nullopt;
}

}  // namespace ferry::config
