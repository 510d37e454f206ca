// What need not be computed again in a block's backward pass.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace ferry::model {

// Results of a block that forward can keep for backward, each in memory of its own: attention's
// output and log-sum-exps; what the MLP's first matrices give, gate and up side by side.
enum class Kept : uint8_t { attention, mlp };
constexpr std::array kAllKept{Kept::attention, Kept::mlp};
constexpr size_t kKept = kAllKept.size();
constexpr size_t at(Kept what) { return static_cast<size_t>(what); }
template <class T>
using OfKept = std::array<T, kKept>;    // one for each
using KeptMemory = OfKept<std::byte*>;  // null: computed again

}  // namespace ferry::model
