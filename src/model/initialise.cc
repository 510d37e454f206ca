#include <algorithm>
#include <cmath>

#include "base/checksum.h"
#include "model/model.h"
#include "normals.h"

namespace ferry::model {
namespace {

bool is_norm_weight(Role role) {
    switch (role) {
        case Role::attention_norm:
        case Role::mlp_norm:
        case Role::final_norm:
        case Role::query_norm:
        case Role::key_norm:
            return true;
        default:
            return false;
    }
}

double deviation_of(const Shape& shape, Role role) {
    const bool residual = role == Role::output || role == Role::down;
    if (!residual || !shape.smaller_residuals) return shape.initial_deviation;
    return shape.initial_deviation / std::sqrt(2 * static_cast<double>(shape.layers));
}

}  // namespace

// The site of numerics.md's counter is a hash of the tensor's name. Neither freezing nor the order
// of a layer's tensors changes a value, so the layer's index is not needed.
void initialise(const Shape& shape, const Layer& layer, uint32_t seed, int64_t first,
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
            std::ranges::fill(part, is_norm_weight(t.role) ? 1.0f : 0.0f);
            continue;
        }
        const auto deviation = static_cast<float>(deviation_of(shape, t.role));
        const uint64_t site = checksum(std::as_bytes(std::span(t.name)));
        for (const SliceRun& run : runs_of(t, from - t.offset, to - from)) {
            const auto of_run = part.subspan(static_cast<size_t>(t.offset + run.at - from),
                                             static_cast<size_t>(run.count));
            philox_normals(key, site, static_cast<uint64_t>(run.from), of_run);
            for (float& value : of_run) value *= deviation;
        }
        if (t.role != Role::token_table || shape.padding_token < 0) continue;
        const int64_t first_row = t.bands.empty() ? 0 : t.bands[0].from;
        if (shape.padding_token < first_row) continue;
        const int64_t row = t.offset + (shape.padding_token - first_row) * shape.hidden;
        for (int64_t e = std::max(from, row); e < std::min(to, row + shape.hidden); ++e)
            part[static_cast<size_t>(e - from)] = 0;
    }
}

}  // namespace ferry::model
