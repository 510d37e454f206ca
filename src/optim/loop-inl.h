// The one loop of all methods: load, apply a rule, store. A method's file defines its rule and
// calls run_rule<Rule>(). Included once a target by Highway's foreach_target.h, hence the toggling
// guard.
#if defined(FERRY_OPTIM_LOOP_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef FERRY_OPTIM_LOOP_INL_H_
#undef FERRY_OPTIM_LOOP_INL_H_
#else
#define FERRY_OPTIM_LOOP_INL_H_
#endif

#include <algorithm>
#include <cstring>

#include "convert-inl.h"
#include "hwy/cache_control.h"
#include "internal.h"

HWY_BEFORE_NAMESPACE();
namespace ferry::optim::HWY_NAMESPACE {

HWY_INLINE VF set(float value) { return hn::Set(F(), value); }

// A NaN compares false and stays.
HWY_INLINE VF flush(VF value, float least) {
    return hn::IfThenZeroElse(hn::Lt(hn::Abs(value), set(least)), value);
}

// The first step of every method.
HWY_INLINE VF scaled(VF gradient, const Scalars& s) {
    return flush(hn::Mul(gradient, set(s.gradient_scale)), kLeastGradient);
}

// Decay as an L2 term of the gradient.
HWY_INLINE VF decayed(VF gradient, VF p, const Scalars& s) {
    return flush(hn::Add(gradient, hn::Mul(p, set(s.weight_decay))), kLeastGradient);
}

// a * x + b * y as three rounded operations.
HWY_INLINE VF blend(VF x, float a, VF y, float b) {
    return hn::Add(hn::Mul(x, set(a)), hn::Mul(y, set(b)));
}

// A rule says which moments it keeps (kM, kV) and has one function,
//     static void apply(VF& p, VF& m, VF& v, VF g, const Scalars& s)

// How a loop treats its arrays; the weight may be absent.
template <class Rule, DType kGradient, DType kWeight, bool kHasWeight>
struct Pass {
    // A cache line of fp32. The hardware's prefetchers stop at the end of a page and follow four
    // streams late; asking 2 KiB ahead was 1.06 (EPYC) to 1.14 (Xeon) times as fast, and anything
    // from 1 KiB to 8 KiB about the same.
    static constexpr int64_t kLine = 16, kAhead = 512;

    // One vector at element i.
    template <Stores kStores>
    HWY_INLINE static void turn(const Span& span, const Scalars& s, int64_t i) {
        constexpr bool kStreamState = kStores == Stores::stream_all;
        constexpr bool kStreamWeight = kStores != Stores::cached;
        VF p = hn::LoadU(F(), span.p_in + i);
        VF m = Rule::kM ? hn::LoadU(F(), span.m_in + i) : hn::Zero(F());
        VF v = Rule::kV ? hn::LoadU(F(), span.v_in + i) : hn::Zero(F());
        Rule::apply(p, m, v, scaled(load_as_f32<kGradient>(span.gradient, i), s), s);
        put<kStreamState>(p, F(), span.p + i);
        if constexpr (Rule::kM) put<kStreamState>(m, F(), span.m + i);
        if constexpr (Rule::kV) put<kStreamState>(v, F(), span.v + i);
        if constexpr (kHasWeight) store_rounded<kWeight, kStreamWeight>(p, span.weight, i);
    }

    template <Stores kStores>
    HWY_INLINE static void line(const Span& span, const Scalars& s, int64_t i) {
        const auto lanes = static_cast<int64_t>(hn::Lanes(F()));
        for (int64_t k = 0; k < kLine; k += lanes) turn<kStores>(span, s, i + k);
    }

    HWY_INLINE static void prefetch(const Span& span, int64_t i) {
        hwy::Prefetch(span.p_in + i);
        if constexpr (Rule::kM) hwy::Prefetch(span.m_in + i);
        if constexpr (Rule::kV) hwy::Prefetch(span.v_in + i);
        hwy::Prefetch(static_cast<const char*>(span.gradient) + i * size_of(kGradient));
    }

    // The last elements, fewer than a line, through a padded copy: the same operations.
    HWY_NOINLINE static void tail(const Span& span, const Scalars& s, int64_t begin) {
        HWY_ALIGN float p[kLine] = {}, m[kLine] = {}, v[kLine] = {};
        HWY_ALIGN unsigned char gradient[kLine * 4] = {}, weight[kLine * 4];
        const auto rest = static_cast<size_t>(span.count - begin);
        const auto g_size = static_cast<size_t>(size_of(kGradient));
        const auto w_size = static_cast<size_t>(size_of(kWeight));
        const auto at = static_cast<size_t>(begin);
        std::memcpy(gradient, static_cast<const char*>(span.gradient) + at * g_size, rest * g_size);
        std::memcpy(p, span.p_in + begin, rest * sizeof(float));
        if (Rule::kM) std::memcpy(m, span.m_in + begin, rest * sizeof(float));
        if (Rule::kV) std::memcpy(v, span.v_in + begin, rest * sizeof(float));
        const Span copy{.count = static_cast<int64_t>(rest),
                        .gradient = gradient,
                        .gradient_type = kGradient,
                        .p_in = p,
                        .m_in = m,
                        .v_in = v,
                        .p = p,
                        .m = m,
                        .v = v,
                        .weight = weight,
                        .weight_type = kWeight};
        line<Stores::cached>(copy, s, 0);
        std::memcpy(span.p + begin, p, rest * sizeof(float));
        if (Rule::kM) std::memcpy(span.m + begin, m, rest * sizeof(float));
        if (Rule::kV) std::memcpy(span.v + begin, v, rest * sizeof(float));
        if (kHasWeight) {
            std::memcpy(static_cast<char*>(span.weight) + at * w_size, weight, rest * w_size);
        }
    }

    template <Stores kStores>
    HWY_INLINE static void all(const Span& given, const Scalars& scalars) {
        // Copies, so that the compiler sees that no store can change them.
        const Span span = given;
        const Scalars s = scalars;
        int64_t i = 0;
        for (; i + kLine <= span.count; i += kLine) {
            if constexpr (kStores != Stores::stream_all) {
                prefetch(span, std::min(i + kAhead, span.count - 1));
            }
            line<kStores>(span, s, i);
        }
        if (kStores != Stores::cached) hwy::FlushStream();
        if (i < span.count) tail(span, s, i);
    }
};

template <class Rule, DType kGradient, DType kWeight, bool kHasWeight>
void with_stores(const Span& span, const Scalars& s, Stores stores) {
    using This = Pass<Rule, kGradient, kWeight, kHasWeight>;
    switch (stores) {
        case Stores::cached:
            return This::template all<Stores::cached>(span, s);
        case Stores::stream_weight:
            return This::template all<Stores::stream_weight>(span, s);
        case Stores::stream_all:
            return This::template all<Stores::stream_all>(span, s);
    }
}

template <class Rule, DType kGradient>
void with_gradient(const Span& span, const Scalars& s, Stores stores) {
    if (!span.weight) return with_stores<Rule, kGradient, DType::f32, false>(span, s, stores);
    switch (span.weight_type) {
        case DType::f32:
            return with_stores<Rule, kGradient, DType::f32, true>(span, s, stores);
        case DType::bf16:
            return with_stores<Rule, kGradient, DType::bf16, true>(span, s, stores);
        case DType::f16:
            return with_stores<Rule, kGradient, DType::f16, true>(span, s, stores);
    }
}

// Returns the name of the target that ran.
template <class Rule>
const char* run_rule(const Span& span, const Scalars& s, Stores stores) {
    switch (span.gradient_type) {
        case DType::f32:
            with_gradient<Rule, DType::f32>(span, s, stores);
            break;
        case DType::bf16:
            with_gradient<Rule, DType::bf16>(span, s, stores);
            break;
        case DType::f16:
            with_gradient<Rule, DType::f16>(span, s, stores);
            break;
    }
    return hwy::TargetName(HWY_TARGET);
}

// AdamW's and Adam's common part.
HWY_INLINE void adam_step(VF& p, VF& m, VF& v, VF g, const Scalars& s) {
    m = flush(blend(m, s.beta1, g, s.one_minus_beta1), kLeastMoment);
    v = flush(blend(v, s.beta2, hn::Mul(g, g), s.one_minus_beta2), kLeastMoment);
    const VF divisor = hn::Add(hn::Mul(hn::Sqrt(v), set(s.inv_sqrt_bias2)), set(s.eps));
    const VF move = hn::Div(hn::Mul(m, set(s.step_size)), divisor);
    p = hn::Sub(hn::Mul(p, set(s.decay)), move);
}

}  // namespace ferry::optim::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // toggling guard
