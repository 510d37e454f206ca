// Dynamic loss scaling for fp16 (docs/numerics.md): gradients travel multiplied by the scale, so
// that small ones do not vanish; a step whose gradients overflowed is skipped at half of it.
#pragma once

#include <cstdint>

namespace ferry::train {

// Steps skipped in a row for numbers that are not finite, scaled or not; after so many nothing is
// learnt any more.
constexpr int64_t kSkipsMost = 20;

class LossScale {
public:
    // Without scaling the value is 1 for ever.
    explicit LossScale(bool scales) : value_(scales ? kFirst : 1), scales_(scales) {}

    bool scales() const noexcept { return scales_; }
    double value() const noexcept { return value_; }  // a power of two
    void good_step() noexcept;
    // Throws diverged below a scale of 1, and after 20 skipped steps in a row.
    void overflow(int64_t step);

    // The state of a run that is resumed: the scale, and good and skipped steps in a row.
    struct State {
        double value = 1;
        int64_t good = 0, skipped = 0;
    };
    State state() const noexcept { return {value_, good_, skipped_}; }
    void resume(const State& state) noexcept {
        value_ = state.value;
        good_ = state.good;
        skipped_ = state.skipped;
    }

private:
    static constexpr double kFirst = 65536;
    static constexpr int64_t kGoodSteps = 2000;

    double value_;
    bool scales_;
    int64_t good_ = 0, skipped_ = 0;  // in a row
};

}  // namespace ferry::train
