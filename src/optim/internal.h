// Constants and helpers that the files of this module share.
#pragma once

#include <vector>

#include "ferry/optim.h"

namespace ferry::optim {

// Magnitudes below these count as zero: of a gradient, of a kept moment.
constexpr float kLeastGradient = 0x1p-60f;
constexpr float kLeastMoment = 0x1p-100f;

// Aborts unless the span holds what the method needs, and nothing overlaps by half.
void check_span(const Span& span, const Scalars& scalars);

// Whether the master is kept as weight and low half.
inline bool is_split(const Span& span) { return span.low != nullptr; }

// An fp16 weight's other half: as bits of floats, an exponent, the least that counts, what is
// between it and the half's unit, and the sum of a unit's bits and those of what it is divided by.
constexpr uint32_t kExponent = 0x7f800000u, kLeastExponent = (127u - 14) << 23;
constexpr uint32_t kUnitBelow = 25u << 23, kScaleSum = (2 * 127u + 25) << 23;
constexpr uint16_t kMinusZero = 0x8000u;  // in fp16

// The random bits that round the moments of a span's element i: those of m in the low half.
uint32_t noise_of(const Span& span, const Scalars& scalars, int64_t i);

// Elements whose random bits are drawn together; Span::element is a multiple of it.
constexpr int64_t kNoiseRun = 32;

// The elements [begin, begin + count) of a span.
Span part_of(const Span& span, int64_t begin, int64_t count);

// Whether the moments are codes, in blocks; none without moments.
inline bool is_coded(const Span& span) { return span.m && span.moment_type == MomentType::int8; }

// What a code stands for in a block of this scale.
float moment_of(Map map, uint8_t code, float scale);

// Elements a task: long enough that handing it out costs nothing, short enough that 16 threads
// share a small tensor. A multiple of kLeaf and of every vector.
constexpr int64_t kTile = 16 * kLeaf;

// body(node, tile) for each tile of `count` elements, all nodes at the same time: each tile by the
// team of the node that holds its first element of `where`. The kernel is asked once a tile: it may
// move a page at any time, and two teams that ask could both take a tile, or neither.
template <class Element, class Body>
void each_tile(NodeTeams& teams, const Element* where, int64_t count, const Body& body) {
    static thread_local std::vector<int> kept;  // allocates for the largest span of the thread only
    kept.resize(static_cast<size_t>(ceil_div(count, kTile)));
    for (size_t tile = 0; tile < kept.size(); ++tile)
        kept[tile] = teams.index_of(where + static_cast<int64_t>(tile) * kTile);
    const std::vector<int>& owners = kept;  // the caller's, on whatever thread it is read
    teams.each([&](int node, Team& team) {
        team.parallel(std::ssize(owners), [&](int64_t tile) {
            if (owners[static_cast<size_t>(tile)] == node) body(node, tile);
        });
    });
}

// The arrays that are written past the caches: none, the weight, or p, m, v as well. Only arrays
// aligned to 64 bytes.
enum class Stores : uint8_t { cached, stream_weight, stream_all };

// Runs a method over a span on the best SIMD target, whose name comes back. Each method's own file
// defines it (dispatch-inl.h).
template <Method kMethod>
const char* run_best(const Span& span, const Scalars& scalars, Stores stores);
template <>
const char* run_best<Method::adamw>(const Span& span, const Scalars& scalars, Stores stores);
template <>
const char* run_best<Method::adam>(const Span& span, const Scalars& scalars, Stores stores);
template <>
const char* run_best<Method::sgd>(const Span& span, const Scalars& scalars, Stores stores);
template <>
const char* run_best<Method::lion>(const Span& span, const Scalars& scalars, Stores stores);
template <>
const char* run_best<Method::adagrad>(const Span& span, const Scalars& scalars, Stores stores);

}  // namespace ferry::optim
