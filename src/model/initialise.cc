#include <algorithm>
#include <cmath>

#include "ferry/model.h"

namespace ferry::model {
namespace {

constexpr double kStandardDeviation = 0.02;

bool ends_with_any(std::string_view name, std::initializer_list<std::string_view> endings) {
    return std::ranges::any_of(endings, [&](std::string_view e) { return name.ends_with(e); });
}

}  // namespace

// The site of numerics.md's counter is a hash of the tensor's name: neither freezing nor the order
// of a layer's tensors changes a value, so the layer's index is not needed.
void initialise(const Shape& shape, const Layer& layer, int64_t, uint32_t seed, int64_t first,
                std::span<float> out) {
    const int64_t end = first + static_cast<int64_t>(out.size());
    const PhiloxKey key{seed, Purpose::initialise};
    std::ranges::fill(out, 0.0f);
    for (const Tensor& t : layer.tensors) {
        const int64_t from = std::max(first, t.offset), to = std::min(end, t.offset + t.count);
        if (from >= to) continue;
        const auto part =
            out.subspan(static_cast<size_t>(from - first), static_cast<size_t>(to - from));
        if (t.shape.size() == 1) {
            std::ranges::fill(part, 1.0f);
            continue;
        }
        const bool residual = ends_with_any(t.name, {"o_proj.weight", "down_proj.weight"});
        const auto layers = static_cast<double>(shape.layers);
        const auto deviation = static_cast<float>(
            residual ? kStandardDeviation / std::sqrt(2 * layers) : kStandardDeviation);
        const uint64_t site = checksum(std::as_bytes(std::span(t.name)));
        for (int64_t i = from; i < to; ++i) {
            const auto element = static_cast<uint64_t>(i - t.offset);
            const std::array<uint32_t, 4> counter{
                static_cast<uint32_t>(element >> 32), static_cast<uint32_t>(site >> 32),
                static_cast<uint32_t>(site), static_cast<uint32_t>(element)};
            part[static_cast<size_t>(i - from)] = philox_normal(key, counter) * deviation;
        }
    }
}

}  // namespace ferry::model
