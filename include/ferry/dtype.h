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

// How an optimizer's state is kept: arrays of the master weight and of the moments, in this order.
struct StateFormat {
    int64_t moments = 2;             // 0 to 2
    DType moment_type = DType::f32;  // or bf16
    bool split = false;              // of the master only the low 16 bits: the weight has the rest
    int64_t master_bytes() const { return split ? 2 : 4; }  // of an element
    int64_t element_bytes() const { return master_bytes() + moments * size_of(moment_type); }
};

}  // namespace ferry
