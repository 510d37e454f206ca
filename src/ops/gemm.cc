// A tile of a matrix product: single-threaded BLAS calls that add to what the tile starts from.
// fp32 is read and written in place; narrow operands are widened a block of depth at a time, and a
// narrow output is summed aside and rounded once.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/gemm.cc"
#include <hwy/foreach_target.h>
// after foreach_target
#include "blas.h"
#include "blas_kernels.h"
#include "kernels.h"
#include "simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace ferry::ops::HWY_NAMESPACE {

// Depth of a widened block, at most. The order of additions depends on it.
constexpr int64_t kDepth = 256;
// Rows of a widened block start in different sets of the cache.
constexpr int64_t kGap = 16;

inline ConstView part_of_a(const Gemm& g, const Rectangle& at, int64_t depth0, int64_t depth) {
    return g.form == Form::tn ? g.a.block(depth0, depth, at.row, at.rows)
                              : g.a.block(at.row, at.rows, depth0, depth);
}

inline ConstView part_of_b(const Gemm& g, const Rectangle& at, int64_t depth0, int64_t depth) {
    return g.form == Form::nt ? g.b.block(at.col, at.cols, depth0, depth)
                              : g.b.block(depth0, depth, at.col, at.cols);
}

inline ConstView widened(const ConstView& from, float* room) {
    const View wide{room, DType::f32, from.rows, from.cols, from.cols + kGap};
    for (int64_t r = 0; r < from.rows; ++r) {
        auto* to = static_cast<float*>(element(wide, r, 0));
        widen(element(from, r, 0), from.type, from.cols, to, from.cols);
    }
    return wide;
}

// sums += a b, all fp32.
inline void multiply(Form form, const ConstView& a, const ConstView& b, const View& sums,
                     Sgemm sgemm) {
    const auto number = [](int64_t n) { return static_cast<blasint>(n); };
    sgemm(CblasRowMajor, form == Form::tn ? CblasTrans : CblasNoTrans,
          form == Form::nt ? CblasTrans : CblasNoTrans, number(sums.rows), number(sums.cols),
          number(form == Form::tn ? a.rows : a.cols), 1, static_cast<const float*>(a.data),
          number(a.ld), static_cast<const float*>(b.data), number(b.ld), 1,
          static_cast<float*>(sums.data), number(sums.ld));
}

HWY_NOINLINE void multiply_narrow(const Gemm& g, const Rectangle& at, int64_t total,
                                  const View& sums, Sgemm sgemm) {
    alignas(64) float a[std::max(kTileRows * (kDepth + kGap), kDepth * (kTileRows + kGap))];
    alignas(64) float b[std::max(kTileCols * (kDepth + kGap), kDepth * (kTileCols + kGap))];
    const int64_t step = round_up(ceil_div(total, ceil_div(total, kDepth)), 16);
    for (int64_t depth0 = 0; depth0 < total; depth0 += step) {
        const int64_t depth = std::min(step, total - depth0);
        multiply(g.form, widened(part_of_a(g, at, depth0, depth), a),
                 widened(part_of_b(g, at, depth0, depth), b), sums, sgemm);
    }
}

// sums = bias + addend + (reads_c() ? c : 0).
inline void start(const Gemm& g, const Rectangle& at, const View& sums) {
    const bool in_place = sums.data == element(g.c, at.row, at.col);
    const bool extras = g.bias.data != nullptr || g.addend.data != nullptr;
    if (g.reads_c() && in_place && !extras) return;
    for (int64_t r = 0; r < at.rows; ++r) {
        const void* c = element(g.c, at.row + r, at.col);
        for_vectors(at.cols, [&](int64_t i, int64_t n) {
            V32 v = hn::Zero(F32());
            if (g.bias.data != nullptr) v = load(g.bias.data, g.bias.type, at.col + i, n);
            if (g.addend.data != nullptr) {
                v = hn::Add(v, load(element(g.addend, at.row + r, at.col), g.addend.type, i, n));
            }
            if (g.reads_c()) v = hn::Add(v, load(c, DType::f32, i, n));
            store(v, element(sums, r, 0), DType::f32, i, n);
        });
    }
}

inline void sum_tile(const Gemm& g, const Rectangle& at, const View& sums, Sgemm sgemm) {
    start(g, at, sums);
    const int64_t total = g.form == Form::tn ? g.a.rows : g.a.cols;
    if (total == 0) return;
    if (g.a.type != DType::f32) return multiply_narrow(g, at, total, sums, sgemm);
    multiply(g.form, part_of_a(g, at, 0, total), part_of_b(g, at, 0, total), sums, sgemm);
}

HWY_NOINLINE void round_tile(const Gemm& g, const Rectangle& at, Sgemm sgemm) {
    alignas(64) float room[kTileRows * kTileCols];
    sum_tile(g, at, View::of(room, DType::f32, at.rows, at.cols), sgemm);
    for (int64_t r = 0; r < at.rows; ++r) {
        void* c = element(g.c, at.row + r, at.col);
        const float* sum = room + r * at.cols;
        for_vectors(at.cols, [&](int64_t i, int64_t n) {
            store(load(sum, DType::f32, i, n), c, g.c.type, i, n);
        });
    }
}

void GemmTile(const Gemm& g, const Rectangle& at, Sgemm sgemm) {
    if (g.c.type != DType::f32) return round_tile(g, at, sgemm);
    sum_tile(g, at, g.c.block(at.row, at.rows, at.col, at.cols), sgemm);
}

const char* TargetName() { return hwy::TargetName(HWY_TARGET); }

}  // namespace ferry::ops::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace ferry::ops {

HWY_EXPORT(GemmTile);
void gemm_tile(const Gemm& gemm, const Rectangle& at, Sgemm sgemm) {
    HWY_DYNAMIC_DISPATCH(GemmTile)(gemm, at, sgemm);
}

HWY_EXPORT(TargetName);
std::string library_versions() { return library_versions_with(blas().core); }
std::string library_versions_with(const std::string& core) {
    return blas().config_with(core) + ", Highway " + HWY_DYNAMIC_DISPATCH(TargetName)();
}

}  // namespace ferry::ops
#endif
