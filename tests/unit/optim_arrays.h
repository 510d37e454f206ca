// Inputs for the optimizer's tests: arrays at any alignment, filled with bit patterns that hurt.
#pragma once

#include <bit>
#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#include "base/random.h"
#include "ferry/optim.h"

namespace ferry::optim {

// Of the seventh update, with what a test of a method wants.
inline Scalars scalars_for(Method method, double lr = 1e-3, double scale = 0.37) {
    Hyper hyper{.method = method, .lr = lr, .weight_decay = 0.1};
    hyper.momentum = method == Method::sgd ? 0.9 : 0;
    return scalars_of(hyper, 7, scale);
}

// Bytes that start `offset` past a 64-byte boundary and end just before a guard that must survive.
class Bytes {
public:
    Bytes(int64_t size, int64_t offset) : size_(size), storage_(static_cast<size_t>(size + 256)) {
        const auto address = reinterpret_cast<uintptr_t>(storage_.data());
        begin_ = (64 - address % 64) % 64 + static_cast<uintptr_t>(64 + offset);
        std::memset(storage_.data(), kGuard, storage_.size());
        std::memset(data(), 0, static_cast<size_t>(size));
    }
    unsigned char* data() { return storage_.data() + begin_; }
    const unsigned char* data() const { return storage_.data() + begin_; }
    float* floats() { return reinterpret_cast<float*>(data()); }
    const float* floats() const { return reinterpret_cast<const float*>(data()); }
    int64_t size() const { return size_; }
    bool guarded() const {
        for (size_t i = 0; i < storage_.size(); ++i) {
            const bool inside = i >= begin_ && i < begin_ + static_cast<size_t>(size_);
            if (!inside && storage_[i] != kGuard) return false;
        }
        return true;
    }
    uint16_t* halves() { return reinterpret_cast<uint16_t*>(data()); }
    void put(int64_t i, float value) { std::memcpy(data() + 4 * i, &value, 4); }
    void put_half(int64_t i, uint16_t half) { std::memcpy(data() + 2 * i, &half, 2); }
    uint16_t get_half(int64_t i) const {
        uint16_t half;
        std::memcpy(&half, data() + 2 * i, 2);
        return half;
    }
    float get(int64_t i) const {
        float value;
        std::memcpy(&value, data() + 4 * i, 4);
        return value;
    }

private:
    static constexpr unsigned char kGuard = 0xA5;
    int64_t size_;
    std::vector<unsigned char> storage_;
    size_t begin_ = 0;
};

inline uint32_t random_bits(uint64_t seed, uint32_t stream, int64_t i) {
    const auto four = philox({static_cast<uint32_t>(seed), Purpose::test},
                             {static_cast<uint32_t>(i / 4), stream, 0, 0});
    return four[static_cast<size_t>(i % 4)];
}

// Any finite bit pattern.
inline float any_finite(uint32_t bits) {
    const float value = std::bit_cast<float>(bits);
    return std::isfinite(value) ? value : std::bit_cast<float>(bits ^ 0x40000000u);
}

// Values at the edges of the formula: zeros, denormals, the flush thresholds and their neighbours,
// the largest, ties of the 16-bit roundings.
inline float edge(uint32_t bits) {
    static const float kEdges[] = {0.0f,
                                   0x1p-149f,
                                   0x1p-127f,
                                   0x1.fffffep-127f,
                                   0x1p-126f,
                                   0x1p-100f,
                                   0x1.fffffep-101f,
                                   0x1.000002p-100f,
                                   0x1p-60f,
                                   0x1.fffffep-61f,
                                   0x1.000002p-60f,
                                   0x1p-30f,
                                   0x1p-25f,
                                   0x1.000002p-25f,
                                   0x1p-24f,
                                   0x1.8p-24f,
                                   0x1.ffep-15f,
                                   0x1p-14f,
                                   1e-8f,
                                   0.5f,
                                   1.0f,
                                   0x1.008p0f,
                                   0x1.018p0f,
                                   0x1.01p0f,
                                   0x1.03p0f,
                                   65504.0f,
                                   65519.99f,
                                   65520.0f,
                                   0x1p64f,
                                   0x1.fep127f,
                                   0x1.ffp127f,
                                   0x1.fffffep127f};
    const float value = kEdges[bits % std::size(kEdges)];
    return bits & 0x80000000u ? -value : value;
}

inline float ordinary(uint32_t bits) {
    return (static_cast<float>(bits & 0xffffffu) - 0x1p23f) * 0x1p-23f;
}

enum class Fill { ordinary, any_finite, edges };

inline float value_of(Fill fill, uint32_t bits) {
    switch (fill) {
        case Fill::ordinary:
            return ordinary(bits);
        case Fill::any_finite:
            return any_finite(bits);
        case Fill::edges:
            return edge(bits);
    }
    return 0;
}

inline uint16_t finite_half(DType type, uint32_t bits) {
    const auto half = static_cast<uint16_t>(bits);
    const float value = type == DType::bf16 ? from_bf16(half) : from_f16(half);
    return std::isfinite(value) ? half : static_cast<uint16_t>(half ^ 0x4000u);
}

// One update's arrays, twice the same; out of place when asked.
struct Case {
    int64_t count = 0;
    DType gradient_type = DType::f32;
    DType weight_type = DType::bf16;
    Fill fill = Fill::ordinary;
    uint64_t seed = 1;
    int64_t offset = 0;  // bytes past a 64-byte boundary
    bool out_of_place = false;
    bool with_weight = true;
    bool with_m = true;
    bool positive_m = false;  // a sum of squares
    MomentType moment_type = MomentType::f32;
    bool split = false;   // the master; the weight has 16 bits
    int64_t element = 0;  // in the layer, of the first
    StateFormat format() const { return {.moment_type = moment_type, .split = split}; }
};

class Arrays {
public:
    explicit Arrays(const Case& c)
        : case_(c),
          gradient_(c.count * size_of(c.gradient_type), c.offset % 64),
          weight_(c.count * size_of(c.weight_type), c.offset % 64),
          weight_in_(c.split && c.out_of_place ? c.count * 2 : 0, c.offset % 64) {
        for (int k = 0; k < 3; ++k) {
            in_.emplace_back(c.count * bytes_of(k), c.offset);
            out_.emplace_back(c.out_of_place ? c.count * bytes_of(k) : 0, c.offset);
            const int64_t scales = k > 0 ? scale_bytes(c.moment_type, c.count) : 0;
            scale_in_.emplace_back(scales, round_down(c.offset, 4));
            scale_out_.emplace_back(c.out_of_place ? scales : 0, round_down(c.offset, 4));
        }
        fill();
    }

    Span span() {
        Span span{.count = case_.count,
                  .gradient = gradient_.data(),
                  .gradient_type = case_.gradient_type,
                  .moment_type = case_.moment_type,
                  .m_in = in_[1].data(),
                  .v_in = in_[2].data(),
                  .m = out(1).data(),
                  .v = out(2).data(),
                  .weight = weight_.data(),
                  .weight_type = case_.weight_type,
                  .layer = 7,
                  .element = case_.element};
        if (case_.split) {
            span.weight_in = weight_in().halves();
            span.low_in = in_[0].halves(), span.low = out(0).halves();
        } else {
            span.p_in = in_[0].floats(), span.p = out(0).floats();
        }
        if (case_.moment_type == MomentType::int8) {
            span.m_scale_in = scale_in(1).floats(), span.m_scale = scale_out(1).floats();
            span.v_scale_in = scale_in(2).floats(), span.v_scale = scale_out(2).floats();
        }
        if (!case_.with_weight) span.weight = nullptr;
        if (!case_.with_m) span.m_in = span.m = nullptr;
        return span;
    }
    Bytes& gradient() { return gradient_; }
    Bytes& weight() { return weight_; }
    Bytes& weight_in() { return case_.out_of_place ? weight_in_ : weight_; }  // of a split master
    Bytes& in(int k) { return in_[static_cast<size_t>(k)]; }
    Bytes& out(int k) { return (case_.out_of_place ? out_ : in_)[static_cast<size_t>(k)]; }

    Bytes& scale_in(int k) { return scale_in_[static_cast<size_t>(k)]; }
    Bytes& scale_out(int k) {
        return (case_.out_of_place ? scale_out_ : scale_in_)[static_cast<size_t>(k)];
    }

    // p, m or v after the update; for a code the value it stands for.
    float value(int k, int64_t i) {
        if (bytes_of(k) == 4) return out(k).get(i);
        if (bytes_of(k) == 1)
            return share_of(map(k), out(k).data()[i]) * scale_out(k).get(i / kMomentBlock);
        const uint16_t half = out(k).get_half(i);
        if (k > 0) return from_bf16(half);
        return join(case_.weight_type, {weight_.get_half(i), half});
    }

    bool guarded() const {
        bool good = gradient_.guarded() && weight_.guarded() && weight_in_.guarded();
        for (int k = 0; k < 3; ++k) {
            good = good && in_[static_cast<size_t>(k)].guarded() &&
                   out_[static_cast<size_t>(k)].guarded() &&
                   scale_in_[static_cast<size_t>(k)].guarded() &&
                   scale_out_[static_cast<size_t>(k)].guarded();
        }
        return good;
    }

private:
    int64_t bytes_of(int k) const {
        return k == 0 ? case_.format().master_bytes() : size_of(case_.moment_type);
    }

    Map map(int k) const {
        return k == 1 && !case_.positive_m ? Map::with_sign : Map::without_sign;
    }

    // A code of all there are; of a block the scale is its first element's value.
    void put_code(int k, int64_t i, float value, uint32_t bits) {
        in(k).data()[i] = static_cast<unsigned char>(bits >> 24 ^ bits >> 8);
        if (i % kMomentBlock == 0) scale_in(k).put(i / kMomentBlock, std::fabs(value));
    }

    void put(int k, int64_t i, float value) {
        if (bytes_of(k) == 4) return in(k).put(i, value);
        const uint32_t bits = std::bit_cast<uint32_t>(value);
        if (k > 0) return in(k).put_half(i, static_cast<uint16_t>(bits >> 16));
        const Halves halves = split(case_.weight_type, value);
        weight_in().put_half(i, halves.weight);
        in(k).put_half(i, halves.low);
    }

    void fill() {
        for (int64_t i = 0; i < case_.count; ++i) {
            for (int k = 0; k < 3; ++k) {
                const auto stream = static_cast<uint32_t>(k);
                const float value = value_of(case_.fill, random_bits(case_.seed, stream, i));
                const bool square = k == 2 || (k == 1 && case_.positive_m);
                if (bytes_of(k) == 1)
                    put_code(k, i, value, random_bits(case_.seed, stream, i));
                else
                    put(k, i, square ? std::fabs(value) : value);
            }
            const uint32_t bits = random_bits(case_.seed, 3, i);
            if (case_.gradient_type == DType::f32) {
                gradient_.put(i, value_of(case_.fill, bits));
                continue;
            }
            uint16_t half = finite_half(case_.gradient_type, bits);
            if (case_.fill == Fill::ordinary) {
                const float value = ordinary(bits);
                half = case_.gradient_type == DType::bf16 ? to_bf16(value) : to_f16(value);
            }
            gradient_.put_half(i, half);
        }
    }

    Case case_;
    Bytes gradient_, weight_, weight_in_;
    std::vector<Bytes> in_, out_, scale_in_, scale_out_;
};

// Equal bits, or both NaN: payloads differ between processors.
inline bool same_float(float a, float b) {
    return std::bit_cast<uint32_t>(a) == std::bit_cast<uint32_t>(b) || (a != a && b != b);
}

inline bool same_weight(DType type, const unsigned char* a, const unsigned char* b) {
    if (std::memcmp(a, b, static_cast<size_t>(size_of(type))) == 0) return true;
    if (type == DType::f32) {
        float x, y;
        std::memcpy(&x, a, 4);
        std::memcpy(&y, b, 4);
        return same_float(x, y);
    }
    uint16_t x, y;
    std::memcpy(&x, a, 2);
    std::memcpy(&y, b, 2);
    const float fx = type == DType::bf16 ? from_bf16(x) : from_f16(x);
    const float fy = type == DType::bf16 ? from_bf16(y) : from_f16(y);
    return fx != fx && fy != fy;
}

// Codes are compared as such: several of a block of NaN would stand for the same.
inline bool same_element(Arrays& a, Arrays& b, int k, int64_t i, const Case& c) {
    const bool coded = k > 0 && c.moment_type == MomentType::int8;
    return same_float(a.value(k, i), b.value(k, i)) &&
           (!coded || a.out(k).data()[i] == b.out(k).data()[i]);
}

// Empty when both hold the same; else the first difference.
inline std::string difference(Arrays& got, Arrays& want, const Case& c) {
    for (int64_t i = 0; i < c.count; ++i) {
        for (int k = 0; k < 3; ++k) {
            const float a = got.value(k, i), b = want.value(k, i);
            if (same_element(got, want, k, i, c)) continue;
            char text[160];
            std::snprintf(text, sizeof(text), "element %lld of %c: %a, reference %a",
                          static_cast<long long>(i), "pmv"[k], static_cast<double>(a),
                          static_cast<double>(b));
            return text;
        }
        const int64_t at = i * size_of(c.weight_type);
        if (!same_weight(c.weight_type, got.weight().data() + at, want.weight().data() + at)) {
            return "element " + std::to_string(i) + " of the weight";
        }
    }
    return got.guarded() && want.guarded() ? "" : "written outside the arrays";
}

}  // namespace ferry::optim
