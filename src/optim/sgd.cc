// SGD for every SIMD target.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "optim/sgd.cc"
#include "base/simd_targets.h"
//
#include "hwy/foreach_target.h"
//
#include "loop-inl.h"

HWY_BEFORE_NAMESPACE();
namespace ferry::optim::HWY_NAMESPACE {

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
};

const char* run_sgd(const Span& span, const Scalars& s, Stores stores) {
    if (!span.m) return run_rule<Sgd<false, false>>(span, s, stores);
    if (!s.nesterov) return run_rule<Sgd<true, false>>(span, s, stores);
    return run_rule<Sgd<true, true>>(span, s, stores);
}

}  // namespace ferry::optim::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace ferry::optim {

HWY_EXPORT(run_sgd);
const char* update_sgd(const Span& span, const Scalars& scalars, Stores stores) {
    return HWY_DYNAMIC_DISPATCH(run_sgd)(span, scalars, stores);
}

}  // namespace ferry::optim
#endif
