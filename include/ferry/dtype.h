// The number types of tensors and of an optimizer's state.
#pragma once

#include <cstdint>
#include <optional>
#include <string_view>

namespace ferry {

enum class DType : uint8_t { f32, bf16, f16 };
constexpr int64_t size_of(DType type) { return type == DType::f32 ? 4 : 2; }
std::string_view name_of(DType type);  // "fp32", "bf16", "fp16"
std::optional<DType> dtype_from_name(std::string_view name);

// Round to nearest, ties to even; NaN stays a NaN.
uint16_t to_bf16(float value) noexcept;
float from_bf16(uint16_t bits) noexcept;
uint16_t to_f16(float value) noexcept;
float from_f16(uint16_t bits) noexcept;

// How an optimizer's moments are kept. int8: codes, and an fp32 scale for each moment block.
enum class MomentType : uint8_t { f32, bf16, int8 };
constexpr int64_t kMomentBlock = 256;         // elements
std::string_view name_of(MomentType type);    // "fp32", "bf16", "int8"
constexpr int64_t size_of(MomentType type) {  // bytes of an element: its value, or its code
    return type == MomentType::f32 ? 4 : type == MomentType::bf16 ? 2 : 1;
}
// Bytes of the scales of so many elements; the last block may be shorter.
constexpr int64_t scale_bytes(MomentType type, int64_t count) {
    return type == MomentType::int8 ? (count + kMomentBlock - 1) / kMomentBlock * 4 : 0;
}

// How an optimizer's state is kept: arrays of the master weight, of each moment, and of the scales
// of each moment, in this order.
struct StateFormat {
    int64_t moments = 2;  // 0 to 2
    MomentType moment_type = MomentType::f32;
    bool split = false;  // only the master's low 16 bits are kept: the weight has the rest
    int64_t master_bytes() const { return split ? 2 : 4; }  // for each element
    // Bytes of `count` elements from the beginning of a moment block.
    int64_t bytes(int64_t count) const {
        return count * (master_bytes() + moments * size_of(moment_type)) +
               moments * scale_bytes(moment_type, count);
    }
    // Bytes of one element, with its share of a scale.
    double element_bytes() const { return static_cast<double>(bytes(kMomentBlock)) / kMomentBlock; }
    bool operator==(const StateFormat&) const = default;
};

}  // namespace ferry
