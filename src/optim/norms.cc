// Leaf norms and the lone cast for every SIMD target.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "optim/norms.cc"
#include "base/simd_targets.h"
#include "ferry/error.h"
//
#include "hwy/foreach_target.h"
//
#include "base/simd_dispatch.h"
#include "loop-inl.h"

HWY_BEFORE_NAMESPACE();
namespace ferry::optim::HWY_NAMESPACE {

constexpr int64_t kLanes = 16;  // lanes of the tree of sums

template <DType kType>
HWY_INLINE VF add_square(VF sum, const void* gradient, int64_t i) {
    const VF g = flush(load_as_f32<kType>(gradient, i), kLeastGradient);
    return hn::Add(sum, hn::Mul(g, g));
}

HWY_INLINE float tree(float* lanes) {
    for (int64_t half = kLanes / 2; half >= 1; half /= 2) {
        for (int64_t j = 0; j < half; ++j) lanes[j] = lanes[j] + lanes[j + half];
    }
    return lanes[0];
}

// One leaf of full length: 16 / N vectors of N lanes. Even where that is one vector, its chain of
// additions takes 64 bytes (32 of a 16-bit gradient) in the latency of an addition. Memory gives
// them more slowly. Several leaves at once were slower, as they confuse the prefetcher.
template <DType kType>
float leaf_norm(const void* gradient) {
    const F d;
    const auto lanes = static_cast<int64_t>(hn::Lanes(d));
    VF a = hn::Zero(d), b = a, c = a, e = a;
    for (int64_t i = 0; i < kLeaf; i += kLanes) {
        a = add_square<kType>(a, gradient, i);
        if (lanes <= 8) b = add_square<kType>(b, gradient, i + lanes);
        if (lanes <= 4) c = add_square<kType>(c, gradient, i + 2 * lanes);
        if (lanes <= 4) e = add_square<kType>(e, gradient, i + 3 * lanes);
    }
    HWY_ALIGN float all[4 * kLanes];
    hn::StoreU(a, d, all);
    hn::StoreU(b, d, all + lanes);
    hn::StoreU(c, d, all + 2 * lanes);
    hn::StoreU(e, d, all + 3 * lanes);
    return tree(all);
}

template <DType kType>
void norms(const void* gradient, int64_t count, float* sums) {
    const auto* bytes = static_cast<const char*>(gradient);
    const int64_t full = count / kLeaf;
    for (int64_t leaf = 0; leaf < full; ++leaf) {
        sums[leaf] = leaf_norm<kType>(bytes + leaf * kLeaf * size_of(kType));
    }
    if (count == full * kLeaf) return;
    HWY_ALIGN char padded[kLeaf * 4] = {};
    std::memcpy(padded, bytes + full * kLeaf * size_of(kType),
                static_cast<size_t>((count - full * kLeaf) * size_of(kType)));
    sums[full] = leaf_norm<kType>(padded);
}

void run_norms(const void* gradient, DType type, int64_t count, float* sums) {
    if (hn::MaxLanes(F()) < 4) return leaf_norms_reference(gradient, type, count, sums);
    switch (type) {
        case DType::f32:
            return norms<DType::f32>(gradient, count, sums);
        case DType::bf16:
            return norms<DType::bf16>(gradient, count, sums);
        case DType::f16:
            return norms<DType::f16>(gradient, count, sums);
    }
}

template <DType kType>
void cast(const float* p, int64_t count, void* weight) {
    const auto lanes = static_cast<int64_t>(hn::Lanes(F()));
    int64_t i = 0;
    for (; i + lanes <= count; i += lanes) {
        store_rounded<kType, false>(hn::LoadU(F(), p + i), weight, i);
    }
    if (i == count) return;
    const auto rest = static_cast<size_t>(count - i);
    HWY_ALIGN float last[hn::MaxLanes(F())] = {};
    HWY_ALIGN char rounded[sizeof(last)];
    std::memcpy(last, p + i, rest * sizeof(float));
    store_rounded<kType, false>(hn::LoadU(F(), last), rounded, 0);
    std::memcpy(static_cast<char*>(weight) + i * size_of(kType), rounded,
                rest * static_cast<size_t>(size_of(kType)));
}

void run_cast(const float* p, int64_t count, DType type, void* weight) {
    switch (type) {
        case DType::f32:
            return cast<DType::f32>(p, count, weight);
        case DType::bf16:
            return cast<DType::bf16>(p, count, weight);
        case DType::f16:
            return cast<DType::f16>(p, count, weight);
    }
}

// Which target a dispatch lands on: what tests ask to know that a target really ran.
const char* run_name() { return hwy::TargetName(HWY_TARGET); }

}  // namespace ferry::optim::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace ferry::optim {

HWY_EXPORT(run_norms);
HWY_EXPORT(run_cast);
HWY_EXPORT(run_name);

void leaf_norms(const void* gradient, DType type, int64_t count, float* leaves) {
    FERRY_CHECK(count >= 0 && (count == 0 || (gradient && leaves)));
    HWY_DYNAMIC_DISPATCH(run_norms)(gradient, type, count, leaves);
}

void recast(const float* p, int64_t count, DType weight_type, void* weight) {
    FERRY_CHECK(count >= 0 && (count == 0 || (p && weight)));
    HWY_DYNAMIC_DISPATCH(run_cast)(p, count, weight_type, weight);
}

std::string current_target() { return HWY_DYNAMIC_DISPATCH(run_name)(); }

std::vector<std::string> supported_targets() { return simd_targets(); }
void force_target(std::string_view name) { force_simd_target(name); }

}  // namespace ferry::optim
#endif
