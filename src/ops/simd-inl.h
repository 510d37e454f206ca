// Loads and stores of any element type as fp32 vectors. Included once per SIMD target.
#if defined(FERRY_OPS_SIMD_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef FERRY_OPS_SIMD_INL_H_
#undef FERRY_OPS_SIMD_INL_H_
#else
#define FERRY_OPS_SIMD_INL_H_
#endif

#include <hwy/contrib/math/math-inl.h>
#include <hwy/highway.h>

#include <algorithm>
#include <cstring>

#include "base/widen-inl.h"
#include "ops/ops.h"

HWY_BEFORE_NAMESPACE();
namespace ferry::ops::HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

// Vectors of at most 16 lanes, which are 64 bytes.
using F32 = hn::CappedTag<float, 16>;
using V32 = hn::Vec<F32>;
// As many 16-bit lanes as a vector of floats has.
using U16 = hn::Rebind<uint16_t, F32>;
using I32 = hn::Rebind<int32_t, F32>;
using U32 = hn::Rebind<uint32_t, F32>;

inline int64_t lanes() { return static_cast<int64_t>(hn::Lanes(F32())); }

using ferry::HWY_NAMESPACE::load_as_f32;

// Nearest even in integers: exact on every target; a NaN stays a NaN.
inline hn::Vec<U16> narrow_bf16(V32 value) {
    const U32 u;
    const auto bits = hn::BitCast(u, value);
    const auto odd = hn::And(hn::ShiftRight<16>(bits), hn::Set(u, 1u));
    const auto rounded = hn::ShiftRight<16>(hn::Add(bits, hn::Add(odd, hn::Set(u, 0x7fffu))));
    const auto quiet = hn::Or(hn::ShiftRight<16>(bits), hn::Set(u, 0x40u));
    const auto nan = hn::MaskFromVec(hn::BitCast(u, hn::VecFromMask(F32(), hn::IsNaN(value))));
    return hn::DemoteTo(U16(), hn::BitCast(I32(), hn::IfThenElse(nan, quiet, rounded)));
}

// Not in line: the type is known when it runs, and fp16 is rare.
inline HWY_NOINLINE V32 load_f16(const void* data, int64_t i) {
    return load_as_f32<DType::f16>(data, i);
}

inline HWY_NOINLINE void store_f16(V32 value, uint16_t* half) {
    alignas(64) float wide[16];
    hn::Store(value, F32(), wide);
    for (int64_t j = 0; j < lanes(); ++j) half[j] = to_f16(wide[j]);
}

HWY_INLINE V32 load_full(const void* data, DType type, int64_t i) {
    if (type == DType::f32) return load_as_f32<DType::f32>(data, i);
    return type == DType::bf16 ? load_as_f32<DType::bf16>(data, i) : load_f16(data, i);
}

HWY_INLINE void store_full(V32 value, void* data, DType type, int64_t i) {
    if (type == DType::f32) return hn::StoreU(value, F32(), static_cast<float*>(data) + i);
    auto* half = static_cast<uint16_t*>(data) + i;
    type == DType::bf16 ? hn::StoreU(narrow_bf16(value), U16(), half) : store_f16(value, half);
}

inline HWY_NOINLINE V32 load_part(const void* data, DType type, int64_t i, int64_t count) {
    alignas(64) float room[16] = {};
    const auto* from = static_cast<const std::byte*>(data) + i * size_of(type);
    std::memcpy(room, from, static_cast<size_t>(count * size_of(type)));
    return load_full(room, type, 0);
}

inline HWY_NOINLINE void store_part(V32 value, void* data, DType type, int64_t i, int64_t count) {
    alignas(64) float room[16];
    store_full(value, room, type, 0);
    auto* to = static_cast<std::byte*>(data) + i * size_of(type);
    std::memcpy(to, room, static_cast<size_t>(count * size_of(type)));
}

// Elements [i, i + count) with count <= lanes(); the rest reads as zero and is not written.
HWY_INLINE V32 load(const void* data, DType type, int64_t i, int64_t count) {
    if (HWY_LIKELY(count == lanes())) return load_full(data, type, i);
    return load_part(data, type, i, count);
}

HWY_INLINE void store(V32 value, void* data, DType type, int64_t i, int64_t count) {
    if (HWY_LIKELY(count == lanes())) return store_full(value, data, type, i);
    store_part(value, data, type, i, count);
}

// body(first element, how many) over [0, count), a vector at a time. One call, so that it is
// inlined.
template <class Body>
HWY_INLINE void for_vectors(int64_t count, const Body& body) {
    for (int64_t i = 0; i < count; i += lanes()) body(i, std::min(lanes(), count - i));
}

// out[0, padded) = in[0, count) as fp32, then zeros.
inline void widen(const void* in, DType type, int64_t count, float* out, int64_t padded) {
    if (type == DType::f32) {
        std::memcpy(out, in, static_cast<size_t>(count) * sizeof(float));
    } else {
        for_vectors(count, [&](int64_t i, int64_t n) {
            store(load(in, type, i, n), out, DType::f32, i, n);
        });
    }
    if (padded > count) std::fill(out + count, out + padded, 0.0f);
}

inline const void* element(const ConstView& v, int64_t row, int64_t col) {
    return static_cast<const std::byte*>(v.data) + (row * v.ld + col) * size_of(v.type);
}
inline void* element(const View& v, int64_t row, int64_t col) {
    return static_cast<std::byte*>(v.data) + (row * v.ld + col) * size_of(v.type);
}

inline float sum_lanes(V32 v) { return hn::GetLane(hn::SumOfLanes(F32(), v)); }

// The library's e^x is exact to one unit in the last place below 104, but drops NaN.
HWY_INLINE V32 exponential(V32 x) {
    const F32 d;
    const V32 y = hn::Exp(d, hn::Min(hn::Set(d, 88.0f), x));
    return hn::IfThenElse(hn::IsNaN(x), x, y);
}

}  // namespace ferry::ops::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
