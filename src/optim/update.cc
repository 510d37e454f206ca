// Which implementation runs, over which parts.
#include <cstdint>
#include <type_traits>

#include "ferry/error.h"
#include "internal.h"

namespace ferry::optim {
namespace {

bool same_or_disjoint(const void* in, const void* out, int64_t bytes) {
    const auto* i = static_cast<const char*>(in);
    const auto* o = static_cast<const char*>(out);
    return i == o || i + bytes <= o || o + bytes <= i;
}

bool aligned(const void* pointer) { return reinterpret_cast<uintptr_t>(pointer) % 64 == 0; }

// An ordinary store first reads the line that it is about to overwrite. What the pass does not read
// anyway is faster written past the caches. That is the weight, and out of place p, m and v too: up
// to a tenth in place, and up to three quarters out of place (bench adam). A span that fits the L2
// cache is left there.
Stores stores_for(const Span& span) {
    if (span.count < kTile || (span.weight && !aligned(span.weight))) return Stores::cached;
    const auto apart = [](const void* in, const void* out) {
        return !out || (in != out && aligned(out));
    };
    const bool moments = apart(span.m_in, span.m) && apart(span.v_in, span.v);
    // The weight of a split master is read too.
    if (is_split(span)) {
        const bool master = apart(span.weight_in, span.weight) && apart(span.low_in, span.low);
        return moments && master ? Stores::stream_all : Stores::cached;
    }
    if (moments && apart(span.p_in, span.p)) return Stores::stream_all;
    return span.weight ? Stores::stream_weight : Stores::cached;
}

const char* run(const Span& span, const Scalars& scalars, Stores stores) {
    switch (scalars.method) {
        case Method::adamw:
            return run_best<Method::adamw>(span, scalars, stores);
        case Method::adam:
            return run_best<Method::adam>(span, scalars, stores);
        case Method::sgd:
            return run_best<Method::sgd>(span, scalars, stores);
        case Method::lion:
            return run_best<Method::lion>(span, scalars, stores);
        case Method::adagrad:
            return run_best<Method::adagrad>(span, scalars, stores);
        case Method::muon:
        case Method::onebit_adam:
        case Method::zeroone_adam:
            break;
    }
    FERRY_CHECK(false, "not a method of single elements");
}

void run_tile(const Span& span, int64_t tile, const Scalars& scalars, Stores stores) {
    const int64_t begin = tile * kTile;
    run(part_of(span, begin, std::min(kTile, span.count - begin)), scalars, stores);
}

void check_master(const Span& span) {
    if (!is_split(span)) {
        FERRY_CHECK(span.p_in && span.p && !span.low_in && !span.weight_in);
        FERRY_CHECK(same_or_disjoint(span.p_in, span.p, span.count * 4));
        return;
    }
    FERRY_CHECK(!span.p_in && !span.p && span.low_in && span.weight_in && span.weight);
    FERRY_CHECK(span.weight_type != DType::f32, "a split master has weights of 16 bits");
    FERRY_CHECK(same_or_disjoint(span.low_in, span.low, span.count * 2));
    FERRY_CHECK(same_or_disjoint(span.weight_in, span.weight, span.count * 2));
}

void check_scales(const Span& span) {
    FERRY_CHECK(span.element % kMomentBlock == 0, std::to_string(span.element));
    const int64_t bytes = scale_bytes(span.moment_type, span.count);
    FERRY_CHECK(span.m_scale_in && span.m_scale);
    FERRY_CHECK(same_or_disjoint(span.m_scale_in, span.m_scale, bytes));
    FERRY_CHECK((span.v == nullptr) == (span.v_scale == nullptr));
    FERRY_CHECK((span.v_scale_in == nullptr) == (span.v_scale == nullptr));
    FERRY_CHECK(same_or_disjoint(span.v_scale_in, span.v_scale, bytes));
}

}  // namespace

void check_span(const Span& span, const Scalars& scalars) {
    FERRY_CHECK(span.count >= 0, std::to_string(span.count));
    if (span.count == 0) return;
    FERRY_CHECK(span.gradient);
    FERRY_CHECK((span.m_in != nullptr) == (span.m != nullptr));
    FERRY_CHECK((span.v_in != nullptr) == (span.v != nullptr));
    const bool needs_m = scalars.method != Method::sgd || scalars.beta1 != 0;
    FERRY_CHECK(span.m || !needs_m, name_of(scalars.method));
    FERRY_CHECK(span.v || moments_of(scalars.method) < 2, name_of(scalars.method));
    const int64_t moment_bytes = span.count * size_of(span.moment_type);
    FERRY_CHECK(same_or_disjoint(span.m_in, span.m, moment_bytes));
    FERRY_CHECK(same_or_disjoint(span.v_in, span.v, moment_bytes));
    check_master(span);
    if (is_coded(span)) return check_scales(span);
    if (span.moment_type != MomentType::bf16) return;
    FERRY_CHECK(span.element % kNoiseRun == 0 && span.element + span.count <= int64_t{1} << 34,
                std::to_string(span.element));
}

Span part_of(const Span& span, int64_t begin, int64_t count) {
    const auto moved = []<class T>(T* array, int64_t bytes) -> T* {
        using Byte = std::conditional_t<std::is_const_v<T>, const char, char>;
        return array ? reinterpret_cast<T*>(reinterpret_cast<Byte*>(array) + bytes) : nullptr;
    };
    const int64_t moment = begin * size_of(span.moment_type);
    Span part = span;
    part.count = count;
    part.element += begin;
    part.gradient = moved(span.gradient, begin * size_of(span.gradient_type));
    part.p_in = moved(span.p_in, begin * 4), part.p = moved(span.p, begin * 4);
    part.m_in = moved(span.m_in, moment), part.m = moved(span.m, moment);
    part.v_in = moved(span.v_in, moment), part.v = moved(span.v, moment);
    const int64_t scale = scale_bytes(span.moment_type, begin);
    part.m_scale_in = moved(span.m_scale_in, scale), part.m_scale = moved(span.m_scale, scale);
    part.v_scale_in = moved(span.v_scale_in, scale), part.v_scale = moved(span.v_scale, scale);
    part.weight = moved(span.weight, begin * size_of(span.weight_type));
    part.weight_in = moved(span.weight_in, begin * 2);
    part.low_in = moved(span.low_in, begin * 2), part.low = moved(span.low, begin * 2);
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
    const auto body = [&](int, int64_t tile) { run_tile(span, tile, scalars, stores); };
    if (is_split(span)) return each_tile(teams, span.low_in, span.count, body);
    each_tile(teams, span.p_in, span.count, body);
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
