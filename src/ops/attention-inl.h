// The inner product kernel of attention. Included once per SIMD target.
#if defined(FERRY_OPS_ATTENTION_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef FERRY_OPS_ATTENTION_INL_H_
#undef FERRY_OPS_ATTENTION_INL_H_
#else
#define FERRY_OPS_ATTENTION_INL_H_
#endif

#include "simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace ferry::ops::HWY_NAMESPACE {

// Rows of a register tile: accumulators, two vectors of b and a broadcast fill the register file
// (32 registers with 64-byte vectors, else 16).
constexpr int kMicroRows = HWY_MAX_BYTES >= 64 ? 8 : 4;
inline int64_t micro_cols() { return 2 * lanes(); }

// Element (r, p) of a lies at r * row + p * step: either operand order needs no transposition.
struct Left {
    const float* data;
    int64_t row, step;
};

// c[kMicroRows, micro_cols()] = (add ? c : 0) + a[kMicroRows, depth] b[depth, micro_cols()].
// Each element is one chain of fused multiply-adds over p, then one addition: it depends neither on
// the tile it lies in nor, where the processor has FMA, on the SIMD target.
HWY_INLINE void micro(int64_t depth, Left a, const float* HWY_RESTRICT b, int64_t b_step,
                      float* HWY_RESTRICT c, int64_t c_row, bool add) {
    const F32 d;
    const int64_t n = lanes();
    V32 left[kMicroRows], right[kMicroRows];
    HWY_UNROLL(8)
    for (int r = 0; r < kMicroRows; ++r) left[r] = right[r] = hn::Zero(d);
    for (int64_t p = 0; p < depth; ++p) {
        const V32 b0 = hn::LoadU(d, b + p * b_step), b1 = hn::LoadU(d, b + p * b_step + n);
        HWY_UNROLL(8)
        for (int r = 0; r < kMicroRows; ++r) {
            const V32 x = hn::Set(d, a.data[r * a.row + p * a.step]);
            left[r] = hn::MulAdd(x, b0, left[r]);
            right[r] = hn::MulAdd(x, b1, right[r]);
        }
    }
    HWY_UNROLL(8)
    for (int r = 0; r < kMicroRows; ++r) {
        float* at = c + r * c_row;
        if (add) {
            left[r] = hn::Add(hn::LoadU(d, at), left[r]);
            right[r] = hn::Add(hn::LoadU(d, at + n), right[r]);
        }
        hn::StoreU(left[r], d, at);
        hn::StoreU(right[r], d, at + n);
    }
}

// out[p * out_row + j] = in[j * in_row + p] for j < micro_cols(), p < depth.
inline void transpose(const float* in, int64_t in_row, int64_t depth, float* out, int64_t out_row) {
    const F32 d;
    const I32 i;
    const auto at = hn::Mul(hn::Iota(i, 0), hn::Set(i, static_cast<int32_t>(in_row)));
    for (int64_t p = 0; p < depth; ++p) {
        hn::StoreU(hn::GatherIndex(d, in + p, at), d, out + p * out_row);
        hn::StoreU(hn::GatherIndex(d, in + lanes() * in_row + p, at), d,
                   out + p * out_row + lanes());
    }
}

}  // namespace ferry::ops::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
