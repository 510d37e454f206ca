#include "state_span.h"

#include <tuple>
#include <utility>

#include "cost/traffic.h"

namespace ferry::train {

optim::Span state_span(const StateFormat& kept, int64_t count, const std::byte* in,
                       std::byte* out) {
    optim::Span span{.count = count, .moment_type = kept.moment_type};
    if (kept.split) {
        span.low_in = reinterpret_cast<const uint16_t*>(in);
        span.low = reinterpret_cast<uint16_t*>(out);
    } else {
        span.p_in = reinterpret_cast<const float*>(in);
        span.p = reinterpret_cast<float*>(out);
    }
    const int64_t m = count * kept.master_bytes(), v = m + count * size_of(kept.moment_type);
    if (kept.moments > 0) span.m_in = in + m, span.m = out + m;
    if (kept.moments > 1) span.v_in = in + v, span.v = out + v;
    if (kept.moment_type != MomentType::int8) return span;
    const int64_t m_scale = m + kept.moments * count * size_of(kept.moment_type),
                  v_scale = m_scale + scale_bytes(kept.moment_type, count);
    const auto scales = [&](int64_t at) {
        return std::pair(reinterpret_cast<const float*>(in + at),
                         reinterpret_cast<float*>(out + at));
    };
    if (kept.moments > 0) std::tie(span.m_scale_in, span.m_scale) = scales(m_scale);
    if (kept.moments > 1) std::tie(span.v_scale_in, span.v_scale) = scales(v_scale);
    return span;
}

int64_t update_bytes_as_asked(const planner::Plan& plan, int64_t count) {
    return static_cast<int64_t>(cost::update_bytes(
        static_cast<double>(count), cost::element_bytes(plan.state, plan.compute, plan.wire)));
}

}  // namespace ferry::train
