// Causal attention tile by tile, in fp32: scores of a tile of queries against a tile of keys, the
// softmax taken online, so that no row of scores ever exists as a whole.
#include <cmath>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/attention.cc"
#include <hwy/foreach_target.h>
// after foreach_target
#include "attention-inl.h"
#include "kernels.h"

HWY_BEFORE_NAMESPACE();
namespace ferry::ops::HWY_NAMESPACE {

constexpr int64_t kTile = kAttentionTile;
using Scores = float[kTile * kTile];

// c[rows, cols] = (add ? c : 0) + a[rows, depth] b[depth, cols]; rows a multiple of kMicroRows,
// cols of kHeadUnit. depth_of(first row) may shorten the sum of a group of rows.
template <class Depth>
HWY_INLINE void product(int64_t rows, int64_t cols, Left a, const float* b, int64_t b_step,
                        float* c, int64_t c_row, bool add, const Depth& depth_of) {
    for (int64_t j = 0; j < cols; j += micro_cols()) {
        for (int64_t r = 0; r < rows; r += kMicroRows) {
            micro(depth_of(r), {a.data + r * a.row, a.row, a.step}, b + j, b_step,
                  c + r * c_row + j, c_row, add);
        }
    }
}

// The tokens of a tile that are there, [begin, end) of it, and where they are.
struct Rows {
    int64_t first, begin, end;  // first: row of the views that is the begin-th of the tile
    int64_t padded() const { return round_up(end, int64_t{kMicroRows}); }
    int64_t at(int64_t r) const { return first + r - begin; }
    bool has(int64_t r) const { return r >= begin && r < end; }
};
inline Rows rows_of(const SequencePart& part, int64_t sequence, int64_t tile) {
    const int64_t at = tile * kTile, begin = std::max<int64_t>(0, part.first - at);
    return {sequence * part.count + at + begin - part.first, begin,
            std::min(kTile, part.end() - at)};
}

// Columns of one head of a tile as fp32, [kTile, D], zeros around them.
inline void copy_tile(const AttentionCall& call, const ConstView& view, const Rows& rows,
                      int64_t head, float* out) {
    const int64_t d = call.shape.head_dim, padded = call.padded_head();
    std::fill(out, out + rows.begin * padded, 0.0f);
    for (int64_t r = rows.begin; r < rows.end; ++r)
        widen(element(view, rows.at(r), head * d), view.type, d, out + r * padded, padded);
    std::fill(out + rows.end * padded, out + kTile * padded, 0.0f);
}

inline void transpose_tile(const float* in, int64_t padded_head, float* out) {
    for (int64_t j = 0; j < kTile; j += micro_cols()) {
        transpose(in + j * padded_head, padded_head, padded_head, out + j, kTile);
    }
}

void PackKeys(const AttentionCall& call, int64_t sequence, int64_t kv_head, bool backward) {
    alignas(64) float room[kTile * kMaxHeadDim];
    const int64_t tile_size = kTile * call.padded_head();
    const int64_t tiles = AttentionCall::tiles(call.keys),
                  first = AttentionCall::first_tile(call.keys);
    const int64_t base = (sequence * call.shape.kv_heads + kv_head) * tiles;
    for (int64_t tile = 0; tile < tiles; ++tile) {
        const Rows rows = rows_of(call.keys, sequence, first + tile);
        const int64_t at = (base + tile) * tile_size;
        float* keys = backward ? call.k_rows + at : room;
        copy_tile(call, call.k, rows, kv_head, keys);
        transpose_tile(keys, call.padded_head(), call.k_transposed + at);
        float* values = backward ? room : call.v_rows + at;
        copy_tile(call, call.v, rows, kv_head, values);
        if (backward) transpose_tile(values, call.padded_head(), call.v_transposed + at);
    }
}

// body(tile of keys) in their order, for those that a tile of queries of this head may see, from
// tile `first` on and before `end`: all of them, or those whose block is in the pattern.
template <class Body>
HWY_INLINE void for_key_tiles(const Attention& s, int64_t head, int64_t tile, int64_t first,
                              int64_t end, const Body& body) {
    end = std::min(end, tile + 1);
    if (s.pattern == nullptr) {
        for (int64_t other = first; other < end; ++other) body(other);
        return;
    }
    const int64_t in_block = s.blocks.block / kTile;
    for (const int64_t block : s.blocks.keys_of(head, tile / in_block)) {
        for (int64_t i = 0; i < in_block; ++i) {
            const int64_t other = block * in_block + i;
            if (other >= first && other < end) body(other);
        }
    }
}

// The same of the tiles of queries from `first` on and before `end` that may see a tile of keys.
template <class Body>
HWY_INLINE void for_query_tiles(const Attention& s, int64_t head, int64_t tile, int64_t first,
                                int64_t end, const Body& body) {
    first = std::max(first, tile);
    if (s.pattern == nullptr) {
        for (int64_t other = first; other < end; ++other) body(other);
        return;
    }
    const int64_t in_block = s.blocks.block / kTile;
    for (const int64_t block : s.blocks.queries_of(head, tile / in_block)) {
        for (int64_t i = 0; i < in_block; ++i) {
            const int64_t other = block * in_block + i;
            if (other >= first && other < end) body(other);
        }
    }
}

// ---------------------------------------------------------------- forward

// State of the online softmax of one row.
struct Softmax {
    float top = -std::numeric_limits<float>::infinity(), sum = 0;
};

// scores become exp(scores * scale - top), zero from `valid` on; what was summed before shrinks by
// the returned factor.
inline float soften(Softmax& state, float* scores, int64_t valid, float scale) {
    const F32 d;
    const V32 low = hn::Set(d, -std::numeric_limits<float>::infinity()), by = hn::Set(d, scale);
    if (valid == 0) {  // the row sees nothing of the tile
        std::fill_n(scores, kTile, 0.0f);
        return 1;
    }
    V32 top = low;
    for_vectors(valid, [&](int64_t i, int64_t n) {
        const V32 s = hn::Mul(hn::LoadU(d, scores + i), by);
        top = hn::Max(
            top, n == lanes() ? s : hn::IfThenElse(hn::FirstN(d, static_cast<size_t>(n)), s, low));
    });
    const float before = state.top;
    state.top = std::max(before, hn::GetLane(hn::MaxOfLanes(d, top)));
    const V32 shift = hn::Set(d, state.top);
    V32 sum = hn::Zero(d);
    for (int64_t i = 0; i < kTile; i += lanes()) {
        const int64_t n = std::clamp<int64_t>(valid - i, 0, lanes());
        V32 p = hn::Zero(d);
        if (n > 0) p = exponential(hn::Sub(hn::Mul(hn::LoadU(d, scores + i), by), shift));
        if (n < lanes()) p = hn::IfThenElseZero(hn::FirstN(d, static_cast<size_t>(n)), p);
        hn::StoreU(p, d, scores + i);
        sum = hn::Add(sum, p);
    }
    const float shrink = before == state.top ? 1.0f : std::exp(before - state.top);
    state.sum = state.sum * shrink + sum_lanes(sum);
    return shrink;
}

// How many keys of a tile that begins at `first_key` the r-th row of a tile of queries sees, with
// `hidden` before them that it does not; 0: none.
inline int64_t seen_keys(const AttentionCall& call, int64_t first_key, int64_t r, bool diagonal,
                         int64_t hidden) {
    const int64_t valid =
        std::min(diagonal ? r + 1 : kTile, std::min(kTile, call.keys.end() - first_key));
    return hidden >= valid ? 0 : valid;
}

// Scores of keys that lie before the first that the row sees count for nothing.
inline void hide_first(float* scores, int64_t hidden) {
    std::fill_n(scores, hidden, -std::numeric_limits<float>::infinity());
}

inline void scale_row(float* row, int64_t count, float factor) {
    const F32 d;
    for (int64_t i = 0; i < count; i += lanes()) {
        hn::StoreU(hn::Mul(hn::LoadU(d, row + i), hn::Set(d, factor)), d, row + i);
    }
}

void AttendTile(const AttentionCall& call, View out, float* lse, int64_t sequence, int64_t head,
                int64_t tile) {
    alignas(64) float q[kTile * kMaxHeadDim], sum[kTile * kMaxHeadDim];
    alignas(64) Scores scores;
    Softmax state[kTile];
    const Attention& s = call.shape;
    const int64_t padded = call.padded_head(), kv = head / (s.heads / s.kv_heads);
    const int64_t keys =
        (sequence * s.kv_heads + kv) * AttentionCall::tiles(call.keys) * kTile * padded;
    const int64_t first_tile = AttentionCall::first_tile(call.keys);
    const Rows rows = rows_of(call.queries, sequence, tile);
    const auto scale = static_cast<float>(s.scale);
    copy_tile(call, call.q, rows, head, q);
    std::fill_n(sum, kTile * padded, 0.0f);
    const int64_t first = call.first_key(sequence, tile * kTile + rows.begin) / kTile;
    for_key_tiles(s, head, tile, first, AttentionCall::end_tile(call.keys), [&](int64_t other) {
        const int64_t at = keys + (other - first_tile) * kTile * padded;
        product(rows.padded(), kTile, {q, padded, 1}, call.k_transposed + at, kTile, scores, kTile,
                false, [&](int64_t) { return padded; });
        for (int64_t r = rows.begin; r < rows.end; ++r) {
            const int64_t hidden = call.first_key(sequence, tile * kTile + r) - other * kTile;
            const int64_t valid = seen_keys(call, other * kTile, r, other == tile, hidden);
            if (hidden > 0 && valid > 0) hide_first(scores + r * kTile, hidden);
            const float shrink = soften(state[r], scores + r * kTile, valid, scale);
            if (shrink != 1) scale_row(sum + r * padded, padded, shrink);
        }
        product(rows.padded(), padded, {scores, kTile, 1}, call.v_rows + at, padded, sum, padded,
                true,
                [&](int64_t r) { return other == tile ? std::min(r + kMicroRows, kTile) : kTile; });
    });
    for (int64_t r = rows.begin; r < rows.end; ++r) {
        // A row that saw no key is 0.
        const V32 total = hn::Set(F32(), state[r].sum == 0 ? 1.0f : state[r].sum);
        void* to = element(out, rows.at(r), head * s.head_dim);
        for_vectors(s.head_dim, [&](int64_t i, int64_t n) {
            store(hn::Div(load(sum + r * padded, DType::f32, i, n), total), to, out.type, i, n);
        });
        lse[call.lse_index(rows.at(r), head)] = state[r].top + std::log(state[r].sum);
    }
}

// ---------------------------------------------------------------- backward

// One head's tile of queries in the backward pass.
struct QueryTile {
    alignas(64) float q[kTile * kMaxHeadDim], dout[kTile * kMaxHeadDim];
    alignas(64) Scores p, ds;
    float lse[kTile], dot[kTile];  // dot: sum of out * dout of the row
};

inline void load_query_tile(const AttentionCall& call, const Rows& rows, int64_t head,
                            QueryTile& t) {
    const Attention& s = call.shape;
    copy_tile(call, call.q, rows, head, t.q);
    copy_tile(call, call.dout, rows, head, t.dout);
    const int64_t padded = call.padded_head();
    for (int64_t r = rows.begin; r < rows.end; ++r) {
        const void* out = element(call.out, rows.at(r), head * s.head_dim);
        V32 sum = hn::Zero(F32());
        for_vectors(s.head_dim, [&](int64_t i, int64_t n) {
            const V32 g = load(t.dout + r * padded, DType::f32, i, n);
            sum = hn::MulAdd(load(out, call.out.type, i, n), g, sum);
        });
        t.dot[r] = sum_lanes(sum);
        t.lse[r] = call.lse[call.lse_index(rows.at(r), head)];
    }
}

// p = exp(scores * scale - lse), ds = p * (dp - dot) * scale; zero where a key is in the future.
// first_query, first_key: positions where the tiles begin.
inline void soften_backward(const AttentionCall& call, int64_t sequence, QueryTile& t,
                            const Rows& rows, int64_t first_query, int64_t first_key) {
    const F32 d;
    const V32 by = hn::Set(d, static_cast<float>(call.shape.scale));
    const bool diagonal = first_query == first_key;
    for (int64_t r = 0; r < rows.padded(); ++r) {
        const int64_t hidden =
            rows.has(r) ? call.first_key(sequence, first_query + r) - first_key : kTile;
        const int64_t valid = seen_keys(call, first_key, r, diagonal, hidden);
        float *p = t.p + r * kTile, *ds = t.ds + r * kTile;
        if (hidden > 0 && valid > 0) hide_first(p, hidden);
        for (int64_t i = 0; i < kTile; i += lanes()) {
            const int64_t n = std::clamp<int64_t>(valid - i, 0, lanes());
            V32 probability = hn::Zero(d), slope = hn::Zero(d);
            if (n > 0) {
                const V32 score = hn::Mul(hn::LoadU(d, p + i), by);
                probability = exponential(hn::Sub(score, hn::Set(d, t.lse[r])));
                slope = hn::Sub(hn::LoadU(d, ds + i), hn::Set(d, t.dot[r]));
                slope = hn::Mul(hn::Mul(probability, slope), by);
            }
            if (n < lanes()) {
                const auto mask = hn::FirstN(d, static_cast<size_t>(n));
                probability = hn::IfThenElseZero(mask, probability);
                slope = hn::IfThenElseZero(mask, slope);
            }
            hn::StoreU(probability, d, p + i);
            hn::StoreU(slope, d, ds + i);
        }
    }
}

inline void write_tile(const AttentionCall& call, const float* sums, const Rows& rows, int64_t head,
                       const View& to) {
    const int64_t d = call.shape.head_dim, padded = call.padded_head();
    for (int64_t r = rows.begin; r < rows.end; ++r) {
        void* out = element(to, rows.at(r), head * d);
        for_vectors(d, [&](int64_t i, int64_t n) {
            store(load(sums + r * padded, DType::f32, i, n), out, to.type, i, n);
        });
    }
}

// Sums of one tile of keys: dk, dv [kTile, D].
struct KeyTile {
    alignas(64) float dk[kTile * kMaxHeadDim], dv[kTile * kMaxHeadDim];
};

// Adds what tile `other` of queries of one head gives to a tile of keys, and takes from it. `at`:
// the key tile's place in the packed buffers. dq: [kTile, D].
inline void attend_back(const AttentionCall& call, int64_t sequence, int64_t at, const Rows& rows,
                        int64_t tile, int64_t other, QueryTile& t, KeyTile& sums, float* dq) {
    const int64_t padded = call.padded_head();
    const auto whole_head = [&](int64_t) { return padded; };
    product(rows.padded(), kTile, {t.q, padded, 1}, call.k_transposed + at, kTile, t.p, kTile,
            false, whole_head);
    product(rows.padded(), kTile, {t.dout, padded, 1}, call.v_transposed + at, kTile, t.ds, kTile,
            false, whole_head);
    soften_backward(call, sequence, t, rows, other * kTile, tile * kTile);
    const auto all_queries = [&](int64_t) { return rows.padded(); };
    product(kTile, padded, {t.p, 1, kTile}, t.dout, padded, sums.dv, padded, true, all_queries);
    product(kTile, padded, {t.ds, 1, kTile}, t.q, padded, sums.dk, padded, true, all_queries);
    product(rows.padded(), padded, {t.ds, kTile, 1}, call.k_rows + at, padded, dq, padded, true,
            [&](int64_t r) { return other == tile ? std::min(r + kMicroRows, kTile) : kTile; });
}

void AttendBackward(const AttentionCall& call, int64_t sequence, int64_t kv_head) {
    QueryTile queries;
    KeyTile sums;
    const Attention& s = call.shape;
    const int64_t group = s.heads / s.kv_heads, tile_size = kTile * call.padded_head();
    const int64_t key_tiles = AttentionCall::tiles(call.keys),
                  first_key = AttentionCall::first_tile(call.keys);
    const int64_t query_tiles = AttentionCall::tiles(call.queries);
    const int64_t first_query = AttentionCall::first_tile(call.queries);
    const int64_t keys = (sequence * s.kv_heads + kv_head) * key_tiles * tile_size;
    float* dq = call.dq_sum + (sequence * s.heads + kv_head * group) * query_tiles * tile_size;
    std::fill_n(dq, group * query_tiles * tile_size, 0.0f);
    for (int64_t tile = first_key; tile < first_key + key_tiles; ++tile) {
        std::fill_n(sums.dk, tile_size, 0.0f);
        std::fill_n(sums.dv, tile_size, 0.0f);
        for (int64_t g = 0; g < group; ++g) {
            const int64_t last = std::min((tile + 1) * kTile, call.keys.end()) - 1;
            const int64_t end = std::min(ceil_div(call.end_query(sequence, last), kTile),
                                         AttentionCall::end_tile(call.queries));
            for_query_tiles(s, kv_head * group + g, tile, first_query, end, [&](int64_t other) {
                const Rows rows = rows_of(call.queries, sequence, other);
                load_query_tile(call, rows, kv_head * group + g, queries);
                attend_back(call, sequence, keys + (tile - first_key) * tile_size, rows, tile,
                            other, queries, sums,
                            dq + (g * query_tiles + other - first_query) * tile_size);
            });
        }
        const Rows rows = rows_of(call.keys, sequence, tile);
        write_tile(call, sums.dk, rows, kv_head, call.dk);
        write_tile(call, sums.dv, rows, kv_head, call.dv);
    }
    for (int64_t i = 0; i < group * query_tiles; ++i) {
        write_tile(call, dq + i * tile_size,
                   rows_of(call.queries, sequence, first_query + i % query_tiles),
                   kv_head * group + i / query_tiles, call.dq);
    }
}

}  // namespace ferry::ops::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace ferry::ops {

HWY_EXPORT(PackKeys);
void pack_keys(const AttentionCall& call, int64_t sequence, int64_t kv_head, bool backward) {
    HWY_DYNAMIC_DISPATCH(PackKeys)(call, sequence, kv_head, backward);
}

HWY_EXPORT(AttendTile);
void attend_tile(const AttentionCall& call, View out, float* lse, int64_t sequence, int64_t head,
                 int64_t tile) {
    HWY_DYNAMIC_DISPATCH(AttendTile)(call, out, lse, sequence, head, tile);
}

HWY_EXPORT(AttendBackward);
void attend_backward(const AttentionCall& call, int64_t sequence, int64_t kv_head) {
    HWY_DYNAMIC_DISPATCH(AttendBackward)(call, sequence, kv_head);
}

}  // namespace ferry::ops
#endif
