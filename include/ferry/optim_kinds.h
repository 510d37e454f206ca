// Which optimizer, and which learning-rate schedule: ferry/optim.h and ferry/learning_rate.h have
// the formulas. A configuration only names them.
#pragma once

#include <cstdint>

namespace ferry::optim {

// onebit_adam and zeroone_adam are AdamW that exchanges its first moment as signs
// (docs/numerics.md).
enum class Method : uint8_t { adamw, adam, sgd, lion, adagrad, muon, onebit_adam, zeroone_adam };
constexpr bool sends_momentum(Method method) {
    return method == Method::onebit_adam || method == Method::zeroone_adam;
}
// What Muon multiplies a matrix's learning rate by; names and factors are torch.optim.Muon's.
enum class AdjustLr : uint8_t { original, match_rms_adamw, spectral_unclamped };
enum class Decay : uint8_t { constant, linear, cosine, wsd, one_cycle, warmup_decay };

}  // namespace ferry::optim
