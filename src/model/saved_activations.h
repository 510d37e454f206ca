// The activations that a block may save, so that backward need not compute them again.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace ferry::model {

// Results of a block that forward can save for backward, each in memory of its own: attention's
// output and log-sum-exps; the MLP's gate and up products, side by side; what attention's own
// products give, queries, keys and values as attention reads them (as its norms do, where heads
// have norms), and the residual behind it.
enum class Saved : uint8_t { attention, mlp, projections };
constexpr std::array kAllSaved{Saved::attention, Saved::mlp, Saved::projections};
constexpr size_t kSaved = kAllSaved.size();
constexpr size_t at(Saved what) { return static_cast<size_t>(what); }
template <class T>
using OfSaved = std::array<T, kSaved>;    // one for each
using SavedMemory = OfSaved<std::byte*>;  // null: computed again

}  // namespace ferry::model
