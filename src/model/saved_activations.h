// The activations that a block may save, so that backward need not compute them again.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace ferry::model {

// Results of a block that forward can save for backward. Each has memory of its own.
//   attention    its output and log-sum-exps
//   mlp          the gate and up products, side by side
//   projections  queries, keys and values as attention reads them, and the residual behind it;
//                where heads have norms, as these norms read them
enum class Saved : uint8_t { attention, mlp, projections };
constexpr std::array kAllSaved{Saved::attention, Saved::mlp, Saved::projections};
constexpr size_t kSaved = kAllSaved.size();
constexpr size_t at(Saved what) { return static_cast<size_t>(what); }
template <class T>
using OfSaved = std::array<T, kSaved>;    // one for each
using SavedMemory = OfSaved<std::byte*>;  // null: computed again

}  // namespace ferry::model
