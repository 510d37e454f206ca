// The frequencies of RoPE and what stretches them, as transformers computes them (its
// modeling_rope_utils), in double.
#include <algorithm>
#include <cmath>
#include <numbers>

#include "model/model.h"

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

// "NTK-aware" scaling: so large a theta that the lowest frequency is stretched by as much as the
// text is longer than what the model was made for.
double dynamic_theta(const Shape& shape, int64_t sequence) {
    const RopeScaling& s = shape.rope_scaling;
    const double longer = std::max(1.0, static_cast<double>(sequence) / s.original_positions);
    const auto dimensions = static_cast<double>(shape.head_dim);
    return shape.rope_theta *
           std::pow(s.factor * longer - (s.factor - 1), dimensions / (dimensions - 2));
}

const std::vector<double>& longrope_factors(const RopeScaling& s, int64_t sequence) {
    const bool longer = static_cast<double>(sequence) > s.original_positions;
    return longer ? s.long_factors : s.short_factors;
}

double turning_pairs(const Shape& shape) {
    return std::floor(shape.rope_scaling.rotated * static_cast<double>(shape.head_dim) / 2);
}

// The frequency theta^(-2 i / head_dim), scaled as the shape asks.
double stretched(const Shape& shape, int64_t sequence, int64_t i, double frequency) {
    const RopeScaling& s = shape.rope_scaling;
    const auto n = static_cast<double>(i);
    switch (s.kind) {
        case RopeScaling::Kind::none:
        case RopeScaling::Kind::dynamic:
            return frequency;
        case RopeScaling::Kind::linear:
            return frequency / s.factor;
        case RopeScaling::Kind::llama3:
            return llama3(s, frequency);
        case RopeScaling::Kind::yarn:
            return Yarn(shape)(n, frequency);
        case RopeScaling::Kind::longrope:
            return frequency / longrope_factors(s, sequence)[static_cast<size_t>(i)];
        case RopeScaling::Kind::proportional:
            return n < turning_pairs(shape) ? frequency / s.factor : 0;
    }
    return frequency;
}

}  // namespace

RopeTable rope_table(const Shape& shape, int64_t sequence) {
    RopeTable table{.amplitude = shape.rope_scaling.amplitude};
    if (shape.learned_positions > 0) return table;
    const bool dynamic = shape.rope_scaling.kind == RopeScaling::Kind::dynamic;
    const double theta = dynamic ? dynamic_theta(shape, sequence) : shape.rope_theta;
    for (int64_t i = 0; i < shape.head_dim / 2; ++i) {
        const double exponent = -2.0 * static_cast<double>(i) / static_cast<double>(shape.head_dim);
        table.frequencies.push_back(stretched(shape, sequence, i, std::pow(theta, exponent)));
    }
    return table;
}

}  // namespace ferry::model
