#include "feedback.h"

#include <array>
#include <bit>
#include <cmath>
#include <cstring>

#include "ferry/error.h"

namespace ferry::zero {
namespace {

constexpr uint32_t kUntouched = 0x80000000u;  // -0

bool is_untouched(float momentum) { return std::bit_cast<uint32_t>(momentum) == kUntouched; }

using Values = std::array<float, kMostAtOnce>;

// This rank's momentum of the step, h; 0 where nothing may be sent.
void take_in(const MomentumShare& share, DType wire, const std::byte* gradient,
             const float* momentum, int64_t count, Values& values) {
    FERRY_CHECK(count <= kMostAtOnce);
    widen(wire, gradient, count, values.data());
    for (int64_t i = 0; i < count; ++i) {
        float& value = values[static_cast<size_t>(i)];
        float g = value * share.gradient_scale;
        g = std::abs(g) < 0x1p-60f ? 0.0f : g;
        value =
            is_untouched(momentum[i]) ? 0.0f : momentum[i] * share.momentum + g * share.gradient;
    }
}

// Encodes the values; the error is what the code is off by, zero where nothing may be sent.
void send(const Codec& codec, const Values& values, const float* momentum, float* error, Part part,
          int64_t first, int64_t count) {
    encode(codec, values.data(), count, part, first);
    Values decoded;
    decode(codec, {part.data, part.count}, first, count, decoded.data());
    for (int64_t i = 0; i < count; ++i) {
        const auto at = static_cast<size_t>(i);
        error[i] = is_untouched(momentum[i]) ? 0.0f : values[at] - decoded[at];
    }
}

}  // namespace

void compress(const Codec& codec, const MomentumShare& share, DType wire, const std::byte* gradient,
              const float* momentum, const float* moved, float* error, Part part, int64_t first,
              int64_t count) {
    Values values;
    take_in(share, wire, gradient, momentum, count, values);
    for (int64_t i = 0; i < count; ++i) {
        float& value = values[static_cast<size_t>(i)];
        value *= share.step;
        if (moved && !share.begins) value = moved[i] + value;
        value = is_untouched(momentum[i]) ? 0.0f : value + error[i];
    }
    send(codec, values, momentum, error, part, first, count);
}

void move_alone(const MomentumShare& share, DType wire, const std::byte* gradient, float* momentum,
                float* moved, int64_t count) {
    Values values;
    take_in(share, wire, gradient, momentum, count, values);
    for (int64_t i = 0; i < count; ++i) {
        const float value = values[static_cast<size_t>(i)];
        const bool untouched = is_untouched(momentum[i]);
        const float before = share.begins ? 0.0f : moved[i];
        moved[i] = untouched ? 0.0f : before + value * share.step;
        momentum[i] = untouched ? momentum[i] : value + 0.0f;  // a sum of -0 is +0
    }
}

void merge(const Codec& codec, const std::byte* parts, int ranks, const float* momentum,
           float* owner_error, Part merged, int64_t first, int64_t count) {
    FERRY_CHECK(count <= kMostAtOnce);
    Values values;
    const int64_t bytes = codec.bytes(merged.count);
    for (int rank = 0; rank < ranks; ++rank) {
        const auto take = rank == 0 ? decode : decode_add;
        take(codec, {parts + rank * bytes, merged.count}, first, count, values.data());
    }
    for (int64_t i = 0; i < count; ++i) {
        float& value = values[static_cast<size_t>(i)];
        value = is_untouched(momentum[i]) ? 0.0f : value + owner_error[i];
    }
    send(codec, values, momentum, owner_error, merged, first, count);
}

void average(const Codec& codec, const MomentumShare& share, ConstPart merged, float* momentum,
             int64_t first, int64_t count) {
    FERRY_CHECK(count <= kMostAtOnce);
    Values values;
    decode(codec, merged, first, count, values.data());
    for (int64_t i = 0; i < count; ++i) {
        const float value = values[static_cast<size_t>(i)] * share.average + 0.0f;  // no -0
        momentum[i] = is_untouched(momentum[i]) ? momentum[i] : value;
    }
}

void mark_untouched(const float* first_moment, const float* second_moment, int64_t count,
                    float* momentum) {
    for (int64_t i = 0; i < count; ++i)
        momentum[i] =
            second_moment[i] == 0 ? std::bit_cast<float>(kUntouched) : first_moment[i] + 0.0f;
}

}  // namespace ferry::zero
