// The formulas of ferry/optim.h as one would write them on paper: the oracle of every fast version.
#include <bit>
#include <cmath>
#include <cstring>

#include "base/random.h"
#include "ferry/error.h"
#include "ferry/optim.h"
#include "internal.h"

namespace ferry::optim {
namespace {

// memcpy: any alignment, and gradients are untyped bytes.
template <class T>
T load(const void* array, int64_t i) {
    T value;
    std::memcpy(&value, static_cast<const char*>(array) + i * int64_t{sizeof(T)}, sizeof(T));
    return value;
}

template <class T>
void store(void* array, int64_t i, T value) {
    std::memcpy(static_cast<char*>(array) + i * int64_t{sizeof(T)}, &value, sizeof(T));
}

float widened(const void* array, DType type, int64_t i) {
    switch (type) {
        case DType::f32:
            return load<float>(array, i);
        case DType::bf16:
            return from_bf16(load<uint16_t>(array, i));
        case DType::f16:
            return from_f16(load<uint16_t>(array, i));
    }
    FERRY_CHECK(false, "unknown type");
}

void store_weight(void* weight, DType type, int64_t i, float value) {
    switch (type) {
        case DType::f32:
            return store(weight, i, value);
        case DType::bf16:
            return store(weight, i, to_bf16(value));
        case DType::f16:
            return store(weight, i, to_f16(value));
    }
}

float flush(float value, float least) { return std::fabs(value) < least ? 0.0f : value; }

struct Element {
    float p, m, v;
};

Element adam_step(Element e, float g, const Scalars& s) {
    e.m = flush(e.m * s.beta1 + g * s.one_minus_beta1, kLeastMoment);
    e.v = flush(e.v * s.beta2 + (g * g) * s.one_minus_beta2, kLeastMoment);
    const float divisor = std::sqrt(e.v) * s.inv_sqrt_bias2 + s.eps;
    e.p = e.p * s.decay - (e.m * s.step_size) / divisor;
    return e;
}

Element sgd_step(Element e, float g, const Scalars& s) {
    e.m = flush(e.m * s.beta1 + g, kLeastMoment);
    const float move = s.nesterov ? g + e.m * s.beta1 : e.m;
    e.p = e.p - move * s.step_size;
    return e;
}

Element lion_step(Element e, float g, const Scalars& s) {
    const float c = flush(e.m * s.beta1 + g * s.one_minus_beta1, kLeastMoment);
    const float sign = c > 0 ? 1.0f : c < 0 ? -1.0f : c;  // zero, or a NaN that stays one
    e.p = e.p * s.decay - sign * s.step_size;
    e.m = flush(e.m * s.beta2 + g * s.one_minus_beta2, kLeastMoment);
    return e;
}

Element adagrad_step(Element e, float g, const Scalars& s) {
    e.m = flush(e.m + g * g, kLeastMoment);
    e.p = e.p - (g * s.step_size) / (std::sqrt(e.m) + s.eps);
    return e;
}

Element step(Element e, float g, const Scalars& s) {
    g = flush(g * s.gradient_scale, kLeastGradient);
    const float decayed = flush(g + e.p * s.weight_decay, kLeastGradient);
    switch (s.method) {
        case Method::adamw:
            return adam_step(e, g, s);
        case Method::adam:
            return adam_step(e, decayed, s);
        case Method::sgd:
            return sgd_step(e, decayed, s);
        case Method::lion:
            return lion_step(e, g, s);
        case Method::adagrad:
            return adagrad_step(e, decayed, s);
        case Method::muon:
        case Method::onebit_adam:
        case Method::zeroone_adam:
            break;
    }
    FERRY_CHECK(false, "unknown method");
}

Element coded_adam_step(Element e, float g, const Scalars& s) {
    e.m = std::fma(g, s.one_minus_beta1, e.m);
    e.v = std::fma(g * s.one_minus_beta2, g, e.v);
    const float divisor = std::fma(std::sqrt(e.v), s.inv_sqrt_bias2, s.eps);
    e.p = std::fma(e.p, s.decay, -((e.m * s.step_size) / divisor));
    return e;
}

Element coded_sgd_step(Element e, float g, const Scalars& s) {
    e.m = e.m + g;
    const float move = s.nesterov ? std::fma(e.m, s.beta1, g) : e.m;
    e.p = std::fma(-move, s.step_size, e.p);
    return e;
}

Element coded_lion_step(Element e, float g, const Scalars& s) {
    const float c = std::fma(e.m, s.beta1, g * s.one_minus_beta1);
    const float sign = c > 0 ? 1.0f : c < 0 ? -1.0f : c;  // zero, or a NaN that stays one
    e.p = std::fma(e.p, s.decay, -(sign * s.step_size));
    e.m = std::fma(e.m, s.beta2, g * s.one_minus_beta2);
    return e;
}

Element coded_adagrad_step(Element e, float g, const Scalars& s) {
    e.m = std::fma(g, g, e.m);
    e.p = e.p - (g * s.step_size) / (std::sqrt(e.m) + s.eps);
    return e;
}

// Of int8 moments, which come times these.
float kept_m(const Scalars& s) {
    return s.method == Method::lion || s.method == Method::adagrad ? 1.0f : s.beta1;
}

Element coded_step(Element e, float g, const Scalars& s) {
    g = g * s.gradient_scale;
    const float decayed = std::fma(e.p, s.weight_decay, g);
    switch (s.method) {
        case Method::adamw:
            return coded_adam_step(e, g, s);
        case Method::adam:
            return coded_adam_step(e, decayed, s);
        case Method::sgd:
            return coded_sgd_step(e, decayed, s);
        case Method::lion:
            return coded_lion_step(e, g, s);
        case Method::adagrad:
            return coded_adagrad_step(e, decayed, s);
        case Method::muon:
        case Method::onebit_adam:
        case Method::zeroone_adam:
            break;
    }
    FERRY_CHECK(false, "unknown method");
}

// 2^e as the bits of a float.
uint32_t exponent_bits(float w) {
    return std::max(std::bit_cast<uint32_t>(w) & kExponent, kLeastExponent);
}

float load_master(const Span& span, int64_t i) {
    if (!is_split(span)) return load<float>(span.p_in, i);
    return join(span.weight_type,
                {load<uint16_t>(span.weight_in, i), load<uint16_t>(span.low_in, i)});
}

void store_master(const Span& span, int64_t i, float p) {
    if (is_split(span)) {
        const Halves halves = split(span.weight_type, p);
        store(span.weight, i, halves.weight);
        store(span.low, i, halves.low);
        return;
    }
    store(span.p, i, p);
    if (span.weight) store_weight(span.weight, span.weight_type, i, p);
}

float load_moment(const void* array, MomentType type, int64_t i) {
    if (!array) return 0.0f;
    return widened(array, type == MomentType::f32 ? DType::f32 : DType::bf16, i);
}

float load_code(const void* codes, const float* scales, Map map, int64_t i, float kept) {
    if (!codes) return 0.0f;
    return moment_of(map, load<uint8_t>(codes, i), load<float>(scales, i / kMomentBlock) * kept);
}

void store_moment(void* array, MomentType type, int64_t i, float value, uint32_t noise) {
    if (type == MomentType::f32) return store(array, i, value);
    if (std::isnan(value)) return store(array, i, to_bf16(value));
    const uint32_t bits = std::bit_cast<uint32_t>(value) + (noise & 0xffffu);
    store(array, i, static_cast<uint16_t>(bits >> 16));
}

}  // namespace

Halves split(DType weight, float p) {
    if (weight == DType::bf16) return split(std::bit_cast<uint32_t>(p));
    const uint16_t cast = to_f16(p), half = cast == kMinusZero ? uint16_t{0} : cast;
    const float w = from_f16(half);
    if (!std::isfinite(w)) return {half, 0};
    const float left = (p - w) * std::bit_cast<float>(kScaleSum - exponent_bits(w));
    return {half, static_cast<uint16_t>(static_cast<int32_t>(left))};
}

float join(DType weight, Halves halves) {
    if (weight == DType::bf16) return std::bit_cast<float>(join(halves));
    const float w = from_f16(halves.weight);
    return w + static_cast<float>(static_cast<int16_t>(halves.low)) *
                   std::bit_cast<float>(exponent_bits(w) - kUnitBelow);
}

uint32_t noise_of(const Span& span, const Scalars& scalars, int64_t i) {
    const int64_t e = span.element + i;
    const auto block = static_cast<uint32_t>(e / 32 * 8 + e % 16 / 2);
    const auto words = philox({scalars.seed, Purpose::stochastic_rounding},
                              {scalars.update, 0, span.layer, block});
    return words[static_cast<size_t>(e % 32 / 16 * 2 + e % 2)];
}

namespace {

// Block by block: the scale is known when all of its moments are.
void update_coded(const Span& span, const Scalars& scalars) {
    const Map of_m = map_of(scalars.method, 0), of_v = map_of(scalars.method, 1);
    const bool has_v = span.v && moments_of(scalars.method) == 2;
    for (int64_t begin = 0; begin < span.count; begin += kMomentBlock) {
        const int64_t count = std::min(span.count - begin, kMomentBlock);
        float m[kMomentBlock], v[kMomentBlock];
        for (int64_t k = 0; k < count; ++k) {
            const int64_t i = begin + k;
            const void* v_in = has_v ? span.v_in : nullptr;
            const Element before{
                .p = load_master(span, i),
                .m = load_code(span.m_in, span.m_scale_in, of_m, i, kept_m(scalars)),
                .v = load_code(v_in, span.v_scale_in, of_v, i, scalars.beta2)};
            const Element after =
                coded_step(before, widened(span.gradient, span.gradient_type, i), scalars);
            store_master(span, i, after.p);
            m[k] = after.m, v[k] = after.v;
        }
        const int64_t block = begin / kMomentBlock;
        const auto size = static_cast<size_t>(count);
        encode_block(of_m, {m, size}, static_cast<uint8_t*>(span.m) + begin, span.m_scale + block);
        if (has_v)
            encode_block(of_v, {v, size}, static_cast<uint8_t*>(span.v) + begin,
                         span.v_scale + block);
    }
}

}  // namespace

void update_reference(const Span& span, const Scalars& scalars) {
    check_span(span, scalars);
    if (is_coded(span)) return update_coded(span, scalars);
    const MomentType type = span.moment_type;
    for (int64_t i = 0; i < span.count; ++i) {
        const Element before{.p = load_master(span, i),
                             .m = load_moment(span.m_in, type, i),
                             .v = load_moment(span.v_in, type, i)};
        const float g = widened(span.gradient, span.gradient_type, i);
        const Element after = step(before, g, scalars);
        const uint32_t noise = type == MomentType::bf16 ? noise_of(span, scalars, i) : 0;
        store_master(span, i, after.p);
        if (span.m) store_moment(span.m, type, i, after.m, noise);
        if (span.v && moments_of(scalars.method) == 2)
            store_moment(span.v, type, i, after.v, noise >> 16);
    }
}

void leaf_norms_reference(const void* gradient, DType type, int64_t count, float* leaves) {
    for (int64_t leaf = 0; leaf * kLeaf < count; ++leaf) {
        float lanes[16] = {};
        for (int64_t i = leaf * kLeaf; i < std::min(count, (leaf + 1) * kLeaf); ++i) {
            const float g = flush(widened(gradient, type, i), kLeastGradient);
            lanes[i % 16] = lanes[i % 16] + g * g;
        }
        for (int half = 8; half >= 1; half /= 2) {
            for (int j = 0; j < half; ++j) lanes[j] = lanes[j] + lanes[j + half];
        }
        leaves[leaf] = lanes[0];
    }
}

}  // namespace ferry::optim
