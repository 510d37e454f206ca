// Each method's formula of ferry/optim.h, over a vector of elements, and the moments it has.
// Included once a target by Highway's foreach_target.h, hence the toggling guard.
#if defined(FERRY_OPTIM_RULES_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef FERRY_OPTIM_RULES_INL_H_
#undef FERRY_OPTIM_RULES_INL_H_
#else
#define FERRY_OPTIM_RULES_INL_H_
#endif

#include "loop-inl.h"

HWY_BEFORE_NAMESPACE();
namespace ferry::optim::HWY_NAMESPACE {

// AdamW's and Adam's common part.
HWY_INLINE void adam_step(VF& p, VF& m, VF& v, VF g, const Scalars& s) {
    m = flush(blend(m, s.beta1, g, s.one_minus_beta1), kLeastMoment);
    v = flush(blend(v, s.beta2, hn::Mul(g, g), s.one_minus_beta2), kLeastMoment);
    const VF divisor = hn::Add(hn::Mul(hn::Sqrt(v), set(s.inv_sqrt_bias2)), set(s.eps));
    const VF move = hn::Div(hn::Mul(m, set(s.step_size)), divisor);
    p = hn::Sub(hn::Mul(p, set(s.decay)), move);
}

HWY_INLINE void coded_adam_step(VF& p, VF& m, VF& v, VF g, const Scalars& s) {
    m = hn::MulAdd(g, set(s.one_minus_beta1), m);
    v = hn::MulAdd(hn::Mul(g, set(s.one_minus_beta2)), g, v);
    const VF divisor = hn::MulAdd(hn::Sqrt(v), set(s.inv_sqrt_bias2), set(s.eps));
    p = hn::MulSub(p, set(s.decay), hn::Div(hn::Mul(m, set(s.step_size)), divisor));
}

// Decay as an L2 term, fused.
HWY_INLINE VF coded_decayed(VF gradient, VF p, const Scalars& s) {
    return hn::MulAdd(p, set(s.weight_decay), gradient);
}

struct AdamW {
    static constexpr bool kM = true, kV = true, kSquares = false;
    HWY_INLINE static void apply(VF& p, VF& m, VF& v, VF g, const Scalars& s) {
        adam_step(p, m, v, g, s);
    }
    HWY_INLINE static void apply_coded(VF& p, VF& m, VF& v, VF g, const Scalars& s) {
        coded_adam_step(p, m, v, g, s);
    }
    HWY_INLINE static float kept_m(const Scalars& s) { return s.beta1; }
};

struct Adam {
    static constexpr bool kM = true, kV = true, kSquares = false;
    HWY_INLINE static void apply(VF& p, VF& m, VF& v, VF g, const Scalars& s) {
        adam_step(p, m, v, decayed(g, p, s), s);
    }
    HWY_INLINE static void apply_coded(VF& p, VF& m, VF& v, VF g, const Scalars& s) {
        coded_adam_step(p, m, v, coded_decayed(g, p, s), s);
    }
    HWY_INLINE static float kept_m(const Scalars& s) { return s.beta1; }
};

// Without momentum m need not exist: it is read as zeros, which changes no bit.
template <bool kMomentum, bool kNesterov>
struct Sgd {
    static constexpr bool kM = kMomentum, kV = false, kSquares = false;
    HWY_INLINE static void apply(VF& p, VF& m, VF&, VF g, const Scalars& s) {
        g = decayed(g, p, s);
        m = flush(hn::Add(hn::Mul(m, set(s.beta1)), g), kLeastMoment);
        const VF move = kNesterov ? hn::Add(g, hn::Mul(m, set(s.beta1))) : m;
        p = hn::Sub(p, hn::Mul(move, set(s.step_size)));
    }
    HWY_INLINE static void apply_coded(VF& p, VF& m, VF&, VF g, const Scalars& s) {
        g = coded_decayed(g, p, s);
        m = hn::Add(m, g);
        const VF move = kNesterov ? hn::MulAdd(m, set(s.beta1), g) : m;
        p = hn::NegMulAdd(move, set(s.step_size), p);
    }
    HWY_INLINE static float kept_m(const Scalars& s) { return s.beta1; }
};

struct Lion {
    static constexpr bool kM = true, kV = false, kSquares = false;
    HWY_INLINE static void apply(VF& p, VF& m, VF&, VF g, const Scalars& s) {
        const VF c = flush(blend(m, s.beta1, g, s.one_minus_beta1), kLeastMoment);
        p = hn::Sub(hn::Mul(p, set(s.decay)), hn::Mul(sign_of(c), set(s.step_size)));
        m = flush(blend(m, s.beta2, g, s.one_minus_beta2), kLeastMoment);
    }
    HWY_INLINE static void apply_coded(VF& p, VF& m, VF&, VF g, const Scalars& s) {
        const VF c = hn::MulAdd(m, set(s.beta1), hn::Mul(g, set(s.one_minus_beta1)));
        p = hn::MulSub(p, set(s.decay), hn::Mul(sign_of(c), set(s.step_size)));
        m = hn::MulAdd(m, set(s.beta2), hn::Mul(g, set(s.one_minus_beta2)));
    }
    HWY_INLINE static float kept_m(const Scalars&) { return 1; }

private:
    HWY_INLINE static VF sign_of(VF c) {
        const VF zero = hn::Zero(F());
        // Neither above nor below zero: a zero, or a NaN that stays one.
        const auto moves = hn::Or(hn::Lt(c, zero), hn::Gt(c, zero));
        return hn::IfThenElse(moves, hn::CopySign(set(1.0f), c), c);
    }
};

struct Adagrad {
    static constexpr bool kM = true, kV = false, kSquares = true;
    HWY_INLINE static void apply(VF& p, VF& m, VF&, VF g, const Scalars& s) {
        g = decayed(g, p, s);
        m = flush(hn::Add(m, hn::Mul(g, g)), kLeastMoment);
        move(p, m, g, s);
    }
    HWY_INLINE static void apply_coded(VF& p, VF& m, VF&, VF g, const Scalars& s) {
        g = coded_decayed(g, p, s);
        m = hn::MulAdd(g, g, m);
        move(p, m, g, s);
    }
    HWY_INLINE static float kept_m(const Scalars&) { return 1; }

private:
    HWY_INLINE static void move(VF& p, VF m, VF g, const Scalars& s) {
        const VF divisor = hn::Add(hn::Sqrt(m), set(s.eps));
        p = hn::Sub(p, hn::Div(hn::Mul(g, set(s.step_size)), divisor));
    }
};

// Returns the name of the target that ran.
template <Method kMethod>
const char* run_method(const Span& span, const Scalars& s, Stores stores) {
    if constexpr (kMethod == Method::adamw) return run_rule<AdamW>(span, s, stores);
    if constexpr (kMethod == Method::adam) return run_rule<Adam>(span, s, stores);
    if constexpr (kMethod == Method::lion) return run_rule<Lion>(span, s, stores);
    if constexpr (kMethod == Method::adagrad) return run_rule<Adagrad>(span, s, stores);
    if constexpr (kMethod == Method::sgd) {
        if (!span.m) return run_rule<Sgd<false, false>>(span, s, stores);
        if (!s.nesterov) return run_rule<Sgd<true, false>>(span, s, stores);
        return run_rule<Sgd<true, true>>(span, s, stores);
    }
}

}  // namespace ferry::optim::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // toggling guard
