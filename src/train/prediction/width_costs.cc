#include "width_costs.h"

#include <algorithm>

namespace ferry::train {

// bench/results/widths_h100.json: a block's operations at 4,096 tokens, hidden 4,096 and an
// intermediate width of 14,336, the products' times summed. An odd vocabulary takes no longer.
std::span<const WidthCost> width_costs() {
    using enum Width;
    static constexpr std::array kCosts{
        WidthCost{hidden, WideOp::products, {2.88, 2.88, 5.67}},
        WidthCost{hidden, WideOp::norm_forward, {1.97, 2.45, 2.63}},
        WidthCost{hidden, WideOp::norm_backward, {2.57, 2.88, 3.05}},
        WidthCost{hidden, WideOp::embedding_forward, {1.56, 2.17, 2.51}},
        WidthCost{hidden, WideOp::embedding_backward, {1.01, 1.40, 1.39}},
        WidthCost{intermediate, WideOp::products, {1.72, 2.99, 4.00}},
        WidthCost{intermediate, WideOp::activation_forward, {1.54, 1.98, 2.20}},
        WidthCost{intermediate, WideOp::activation_backward, {2.03, 2.73, 3.09}},
    };
    return kCosts;
}

std::optional<double> factor_of(std::span<const WidthCost> costs, Width width, WideOp operation,
                                int64_t columns) {
    constexpr double kNamed = 1.05;  // less is within what two runs of a kernel differ
    if (columns % kWidthUnit == 0) return std::nullopt;
    const auto known = std::ranges::find_if(costs, [&](const WidthCost& cost) {
        return cost.width == width && cost.operation == operation;
    });
    if (known == costs.end()) return std::nullopt;
    const size_t class_of = columns % 4 == 0 ? 0 : columns % 2 == 0 ? 1 : 2;
    const double factor = known->factors[class_of];
    return factor < kNamed ? std::nullopt : std::optional(factor);
}

}  // namespace ferry::train
