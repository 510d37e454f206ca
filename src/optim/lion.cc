// Lion for every SIMD target.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "optim/lion.cc"
#include "base/simd_targets.h"
//
#include "hwy/foreach_target.h"
//
#include "loop-inl.h"

HWY_BEFORE_NAMESPACE();
namespace ferry::optim::HWY_NAMESPACE {

struct Lion {
    static constexpr bool kM = true, kV = false, kSquares = false;
    HWY_INLINE static void apply(VF& p, VF& m, VF&, VF g, const Scalars& s) {
        const VF c = flush(blend(m, s.beta1, g, s.one_minus_beta1), kLeastMoment);
        const VF one = hn::CopySign(set(1.0f), c);
        const VF zero = hn::Zero(F());
        // Neither above nor below zero: a zero, or a NaN that stays one.
        const auto moves = hn::Or(hn::Lt(c, zero), hn::Gt(c, zero));
        const VF sign = hn::IfThenElse(moves, one, c);
        p = hn::Sub(hn::Mul(p, set(s.decay)), hn::Mul(sign, set(s.step_size)));
        m = flush(blend(m, s.beta2, g, s.one_minus_beta2), kLeastMoment);
    }
};

const char* run_lion(const Span& span, const Scalars& s, Stores stores) {
    return run_rule<Lion>(span, s, stores);
}

}  // namespace ferry::optim::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace ferry::optim {

HWY_EXPORT(run_lion);
const char* update_lion(const Span& span, const Scalars& scalars, Stores stores) {
    return HWY_DYNAMIC_DISPATCH(run_lion)(span, scalars, stores);
}

}  // namespace ferry::optim
#endif
