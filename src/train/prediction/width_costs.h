// What operations take longer on a GPU where a width is no multiple of 8 elements of 16 bits, as
// bench/widths.py measures it: a row then begins at no multiple of 16 bytes.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <span>

namespace ferry::train {

// Elements of a row of 16 bytes: what tensor cores and whole loads want widths to be multiples of.
constexpr int64_t kWidthUnit = 8;

enum class Width { hidden, intermediate };
enum class WideOp {
    products,  // forward, and those of both gradients
    norm_forward,
    norm_backward,
    embedding_forward,
    embedding_backward,
    activation_forward,  // SwiGLU or GELU
    activation_backward,
};

// Times as long as with the next width that is a multiple. By how much a width misses one: rows
// begin at multiples of 8, of 4 and of 2 bytes.
struct WidthCost {
    Width width{};
    WideOp operation{};
    std::array<double, 3> factors{};
};

// Those of an H100. What does not stand here is not named.
std::span<const WidthCost> width_costs();

// Of an operation at a width of so many columns; none where it takes no longer.
std::optional<double> factor_of(std::span<const WidthCost> costs, Width width, WideOp operation,
                                int64_t columns);

}  // namespace ferry::train
