// Describes the keys that two runs must have in common for one to go on with the other.
#include <algorithm>
#include <array>
#include <span>

#include "ferry/config.h"

namespace ferry {
namespace {

// The model's shape, its attention and what the numerics section says are in the run's numerics
// record; what `model` says besides, and the contents of files, are proved by themselves.
constexpr std::array<std::string_view, 11> kSectionsLeftOut = {
    "model",      "attention", "evaluate", "budgets", "swap",    "io",
    "checkpoint", "numerics",  "batch",    "zero",    "parallel"};
constexpr std::array<std::string_view, 9> kKeysLeftOut = {
    "steps",
    "threads",
    "reserved_cores",
    "hash_every",
    "data.tokens",
    "data.small_vocabulary",
    "data.isolate_documents",  // in the numerics record
    "optimizer.ns_products",
    "optimizer.fp32_moments"};  // both in the numerics record, where they are used
// Without a fall the rate does not depend on where the run ends.
constexpr std::array<std::string_view, 3> kOfTheFall = {
    "schedule.total_steps", "schedule.decay_steps", "schedule.final_fraction"};
// Beside another method they say nothing.
constexpr std::array<std::string_view, 5> kOfMuon = {
    "optimizer.ns_steps", "optimizer.ns_coefficients", "optimizer.adjust_lr", "optimizer.adamw_lr",
    "optimizer.adamw_tensors"};

constexpr std::array<std::string_view, 1> kOfOnebitAdam = {"optimizer.freeze_step"};
constexpr std::array<std::string_view, 4> kOfZerooneAdam = {
    "optimizer.var_freeze_step", "optimizer.var_update_scaler", "optimizer.local_step_scaler",
    "optimizer.local_step_clipper"};

bool contains(std::span<const std::string_view> words, std::string_view word) {
    return std::find(words.begin(), words.end(), word) != words.end();
}

}  // namespace

std::string describe_training(const Config& config) {
    const bool muon = config.optimizer.method == optim::Method::muon;
    const bool onebit = config.optimizer.method == optim::Method::onebit_adam;
    const bool zeroone = config.optimizer.method == optim::Method::zeroone_adam;
    const bool falls = config.schedule.kind != optim::Decay::constant;
    std::string text;
    for (const KeyValue& one : describe_values(config)) {
        const std::string_view key = one.key;
        const size_t dot = key.find('.');
        const std::string_view section = dot == std::string_view::npos ? "" : key.substr(0, dot);
        if (contains(kSectionsLeftOut, section) || contains(kKeysLeftOut, key) ||
            (!falls && contains(kOfTheFall, key)) || (!muon && contains(kOfMuon, key)) ||
            (!onebit && contains(kOfOnebitAdam, key)) ||
            (!zeroone && contains(kOfZerooneAdam, key)))
            continue;
        text += one.key + " = " + one.value + "\n";
    }
    return text;
}

}  // namespace ferry
