// Which implementation runs, over which pieces.
#include <cstdint>

#include "internal.h"

namespace ferry::optim {
namespace {

bool same_or_disjoint(const float* in, const float* out, int64_t count) {
    return in == out || in + count <= out || out + count <= in;
}

bool aligned(const void* pointer) { return reinterpret_cast<uintptr_t>(pointer) % 64 == 0; }

// An ordinary store first reads the line it is about to overwrite; what the pass does not read
// anyway is better written past the caches. That is the weight (in place 1.02 to 1.10 times as fast
// on a 2-core EPYC, 1.08 to 1.11 on 1 to 16 cores of a Xeon), and out of place p, m and v too (ns
// an element, plain against non-temporal: 1.49 / 0.84 on one core and 1.18 / 0.75 on both of the
// EPYC, 0.24 / 0.17 on 16 of the Xeon). A span that fits the L2 cache is left there.
Stores stores_for(const Span& span) {
    if (span.count < kTile || (span.weight && !aligned(span.weight))) return Stores::cached;
    const bool apart = span.p != span.p_in && aligned(span.p) &&
                       (!span.m || (span.m != span.m_in && aligned(span.m))) &&
                       (!span.v || (span.v != span.v_in && aligned(span.v)));
    if (apart) return Stores::stream_all;
    return span.weight ? Stores::stream_weight : Stores::cached;
}

const char* run(const Span& span, const Scalars& scalars, Stores stores) {
    switch (scalars.method) {
        case Method::adamw:
            return update_adamw(span, scalars, stores);
        case Method::adam:
            return update_adam(span, scalars, stores);
        case Method::sgd:
            return update_sgd(span, scalars, stores);
        case Method::lion:
            return update_lion(span, scalars, stores);
        case Method::adagrad:
            return update_adagrad(span, scalars, stores);
    }
    FERRY_CHECK(false, "unknown method");
}

void run_tile(const Span& span, int64_t tile, const Scalars& scalars, Stores stores) {
    const int64_t begin = tile * kTile;
    run(part_of(span, begin, std::min(kTile, span.count - begin)), scalars, stores);
}

}  // namespace

void check_span(const Span& span, const Scalars& scalars) {
    FERRY_CHECK(span.count >= 0, std::to_string(span.count));
    if (span.count == 0) return;
    FERRY_CHECK(span.gradient && span.p_in && span.p);
    FERRY_CHECK((span.m_in != nullptr) == (span.m != nullptr));
    FERRY_CHECK((span.v_in != nullptr) == (span.v != nullptr));
    const bool needs_m = scalars.method != Method::sgd || scalars.beta1 != 0;
    FERRY_CHECK(span.m || !needs_m, name_of(scalars.method));
    FERRY_CHECK(span.v || moments_of(scalars.method) < 2, name_of(scalars.method));
    FERRY_CHECK(same_or_disjoint(span.p_in, span.p, span.count));
    FERRY_CHECK(same_or_disjoint(span.m_in, span.m, span.count));
    FERRY_CHECK(same_or_disjoint(span.v_in, span.v, span.count));
}

Span part_of(const Span& span, int64_t begin, int64_t count) {
    Span part = span;
    part.count = count;
    part.gradient = static_cast<const char*>(span.gradient) + begin * size_of(span.gradient_type);
    part.p_in += begin;
    part.p += begin;
    if (span.m) part.m_in += begin, part.m += begin;
    if (span.v) part.v_in += begin, part.v += begin;
    if (span.weight)
        part.weight = static_cast<char*>(span.weight) + begin * size_of(span.weight_type);
    return part;
}

void update(const Span& span, const Scalars& scalars) {
    check_span(span, scalars);
    run(span, scalars, stores_for(span));
}

void update(Team& team, const Span& span, const Scalars& scalars) {
    check_span(span, scalars);
    const Stores stores = stores_for(span);
    team.parallel(ceil_div(span.count, kTile),
                  [&](int64_t tile) { run_tile(span, tile, scalars, stores); });
}

void update(NodeTeams& teams, const Span& span, const Scalars& scalars) {
    if (teams.count() == 1) return update(teams.team(0), span, scalars);
    check_span(span, scalars);
    const Stores stores = stores_for(span);
    each_tile(teams, span.p_in, span.count,
              [&](int, int64_t tile) { run_tile(span, tile, scalars, stores); });
}

std::string current_target(Method method) {
    return run(Span{}, Scalars{.method = method}, Stores::cached);
}

void leaf_norms(Team& team, const void* gradient, DType type, int64_t count, float* leaves) {
    const auto* bytes = static_cast<const char*>(gradient);
    team.parallel(ceil_div(count, kTile), [&](int64_t tile) {
        const int64_t begin = tile * kTile;
        leaf_norms(bytes + begin * size_of(type), type, std::min(kTile, count - begin),
                   leaves + begin / kLeaf);
    });
}

}  // namespace ferry::optim
