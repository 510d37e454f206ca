#include "weight_alone.h"

#include <array>

#include "ferry/error.h"

namespace ferry::train {

void update_weight_alone(const optim::Span& span, int64_t first, int64_t count,
                         const optim::Scalars& scalars) {
    FERRY_CHECK(count <= optim::kLeaf && span.moment_type == MomentType::f32 && !span.low,
                "a weight beside state in fp32");
    std::array<float, optim::kLeaf> p, m, v;
    optim::Span part = span;
    part.count = count;
    part.gradient = static_cast<const float*>(span.gradient) + first;
    part.p_in = span.p_in + first;
    part.m_in = static_cast<const float*>(span.m_in) + first;
    part.v_in = static_cast<const float*>(span.v_in) + first;
    part.p = p.data();
    part.m = m.data();
    part.v = v.data();
    part.weight = static_cast<std::byte*>(span.weight) + first * size_of(span.weight_type);
    part.element = span.element + first;
    optim::update(part, scalars);
}

}  // namespace ferry::train
