#include "width_costs.h"

#include <algorithm>

namespace ferry::train {

std::span<const WidthCost> width_costs() { return {}; }

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
