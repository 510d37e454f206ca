// A tile of a matrix product: operands are widened and packed a block of depth at a time, summed in
// fp32, rounded once at the end.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "../src/ops/gemm.cc"
#include <hwy/foreach_target.h>
// after foreach_target
#include "kernels.h"
#include "micro-inl.h"

HWY_BEFORE_NAMESPACE();
namespace ferry::ops::HWY_NAMESPACE {

// Depth of a block: a panel of b stays in the first cache, a of a tile in the second. The order of
// additions depends on it and on nothing else.
constexpr int64_t kDepth = 256;
// Rows of packed a start in different sets of the cache.
constexpr int64_t kRowStep = kDepth + 16;

struct Room {
    alignas(64) float a[kTileRows * kRowStep];  // [rows, depth]; tn: [rows / 8, depth, 8]
    alignas(64) float b[kTileCols * kDepth];    // panels: [cols / micro_cols][depth][micro_cols]
    alignas(64) float c[kTileRows * kTileCols];
};

// a is [k, m]: a group of rows of the product side by side, so that the kernel reads straight on.
inline void pack_a_transposed(const Gemm& g, const Rectangle& at, int64_t depth0, int64_t depth,
                              float* out) {
    alignas(64) float wide[kTileRows];
    const int64_t rows = round_up(at.rows, kMicroRows);
    for (int64_t p = 0; p < depth; ++p) {
        const void* in = element(g.a, depth0 + p, at.row);
        const bool straight = g.a.type == DType::f32 && rows == at.rows;
        if (!straight) widen(in, g.a.type, at.rows, wide, rows);
        const float* from = straight ? static_cast<const float*>(in) : wide;
        for (int64_t r = 0; r < rows; r += kMicroRows) {
            std::memcpy(out + r * kRowStep + p * kMicroRows, from + r, kMicroRows * sizeof(float));
        }
    }
}

inline Left pack_a(const Gemm& g, const Rectangle& at, int64_t depth0, int64_t depth, float* out) {
    if (g.form == Form::tn) {
        pack_a_transposed(g, at, depth0, depth, out);
        return {.data = out, .row = 1, .step = kMicroRows};
    }
    for (int64_t r = 0; r < at.rows; ++r) {
        widen(element(g.a, at.row + r, depth0), g.a.type, depth, out + r * kRowStep, depth);
    }
    const int64_t rows = round_up(at.rows, kMicroRows);
    std::fill(out + at.rows * kRowStep, out + rows * kRowStep, 0.0f);
    return {.data = out, .row = kRowStep, .step = 1};
}

// b is [n, k]: columns of the panel are rows of b.
inline void pack_b_transposed(const Gemm& g, int64_t col, int64_t cols, int64_t depth0,
                              int64_t depth, float* out) {
    if (g.b.type == DType::f32 && cols == micro_cols()) {
        return transpose(static_cast<const float*>(element(g.b, col, depth0)), g.b.ld, depth, out,
                         micro_cols());
    }
    alignas(64) float wide[32 * kDepth];
    for (int64_t j = 0; j < cols; ++j) {
        widen(element(g.b, col + j, depth0), g.b.type, depth, wide + j * kDepth, depth);
    }
    std::fill(wide + cols * kDepth, wide + micro_cols() * kDepth, 0.0f);
    transpose(wide, kDepth, depth, out, micro_cols());
}

inline void pack_b(const Gemm& g, const Rectangle& at, int64_t depth0, int64_t depth, float* out) {
    for (int64_t j = 0; j < at.cols; j += micro_cols(), out += kDepth * micro_cols()) {
        const int64_t cols = std::min(micro_cols(), at.cols - j);
        if (g.form == Form::nt) {
            pack_b_transposed(g, at.col + j, cols, depth0, depth, out);
            continue;
        }
        for (int64_t p = 0; p < depth; ++p) {
            const void* in = element(g.b, depth0 + p, at.col + j);
            float* to = out + p * micro_cols();
            if (cols < micro_cols()) {
                widen(in, g.b.type, cols, to, micro_cols());
                continue;
            }
            store_full(load_full(in, g.b.type, 0), to, DType::f32, 0);
            store_full(load_full(in, g.b.type, lanes()), to, DType::f32, lanes());
        }
    }
}

inline void finish(const Gemm& g, const Rectangle& at, const float* sums) {
    for (int64_t r = 0; r < at.rows; ++r) {
        void* c = element(g.c, at.row + r, at.col);
        const float* sum = sums + r * kTileCols;
        for_vectors(at.cols, [&](int64_t i, int64_t n) {
            V32 v = load(sum, DType::f32, i, n);
            if (g.bias.data != nullptr)
                v = hn::Add(v, load(g.bias.data, g.bias.type, at.col + i, n));
            if (g.addend.data != nullptr) {
                v = hn::Add(v, load(element(g.addend, at.row + r, at.col), g.addend.type, i, n));
            }
            if (g.accumulate) v = hn::Add(v, load(c, DType::f32, i, n));
            store(v, c, g.c.type, i, n);
        });
    }
}

void GemmTile(const Gemm& g, const Rectangle& at) {
    Room room;
    const int64_t total = g.form == Form::tn ? g.a.rows : g.a.cols;
    if (total == 0) std::fill_n(room.c, kTileRows * kTileCols, 0.0f);
    for (int64_t depth0 = 0; depth0 < total; depth0 += kDepth) {
        const int64_t depth = std::min(kDepth, total - depth0);
        const Left a = pack_a(g, at, depth0, depth, room.a);
        pack_b(g, at, depth0, depth, room.b);
        for (int64_t j = 0; j < at.cols; j += micro_cols()) {
            for (int64_t r = 0; r < at.rows; r += kMicroRows) {
                micro(depth, {room.a + r * kRowStep, a.row, a.step}, room.b + j * kDepth,
                      micro_cols(), room.c + r * kTileCols + j, kTileCols, depth0 > 0);
            }
        }
    }
    finish(g, at, room.c);
}

}  // namespace ferry::ops::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace ferry::ops {

HWY_EXPORT(GemmTile);
void gemm_tile(const Gemm& gemm, const Rectangle& at) { HWY_DYNAMIC_DISPATCH(GemmTile)(gemm, at); }

}  // namespace ferry::ops
#endif
