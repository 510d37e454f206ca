// The frequencies of RoPE and what stretches them, as transformers computes them (its
// modeling_rope_utils), in double.
#include <algorithm>
#include <cmath>
#include <numbers>
#include <optional>

#include "ferry/model.h"

namespace ferry::model {
namespace {

// Low frequencies are divided by the factor, high ones stay, between them lies a ramp.
double llama3(const RopeScaling& s, double frequency) {
    const double wavelength = 2 * std::numbers::pi / frequency;
    const double turns = s.original_positions / wavelength;
    if (turns < s.low_frequency) return frequency / s.factor;
    if (turns > s.high_frequency) return frequency;
    const double smooth = (turns - s.low_frequency) / (s.high_frequency - s.low_frequency);
    return (1 - smooth) * frequency / s.factor + smooth * frequency;
}

// Peng et al. 2023, "YaRN": the same, with the ramp over dimensions instead of frequencies.
class Yarn {
public:
    explicit Yarn(const Shape& shape) : scaling_(shape.rope_scaling) {
        const double dimensions = static_cast<double>(shape.head_dim);
        // The dimension that turns so many times in the original text.
        const auto dimension = [&](double turns) {
            return dimensions *
                   std::log(scaling_.original_positions / (turns * 2 * std::numbers::pi)) /
                   (2 * std::log(shape.rope_theta));
        };
        double low = dimension(scaling_.beta_fast), high = dimension(scaling_.beta_slow);
        if (scaling_.truncate) low = std::floor(low), high = std::ceil(high);
        low_ = std::max(low, 0.0);
        high_ = std::min(high, dimensions - 1);
        if (low_ == high_) high_ += 0.001;
    }
    double operator()(double i, double frequency) const {
        const double ramp = std::clamp((i - low_) / (high_ - low_), 0.0, 1.0);
        return frequency / scaling_.factor * ramp + frequency * (1 - ramp);
    }

private:
    const RopeScaling& scaling_;
    double low_ = 0, high_ = 0;
};

}  // namespace

RopeTable rope_table(const Shape& shape) {
    RopeTable table;
    if (shape.learned_positions > 0) return table;
    const RopeScaling& scaling = shape.rope_scaling;
    std::optional<Yarn> yarn;
    if (scaling.kind == RopeScaling::Kind::yarn) yarn.emplace(shape);
    for (int64_t i = 0; i < shape.head_dim / 2; ++i) {
        const auto n = static_cast<double>(i);
        double f = std::pow(shape.rope_theta, -2.0 * n / static_cast<double>(shape.head_dim));
        if (scaling.kind == RopeScaling::Kind::linear) f /= scaling.factor;
        if (scaling.kind == RopeScaling::Kind::llama3) f = llama3(scaling, f);
        if (yarn) f = (*yarn)(n, f);
        table.frequencies.push_back(f);
    }
    if (yarn) table.amplitude = scaling.amplitude;
    return table;
}

}  // namespace ferry::model
