// Adagrad for every SIMD target.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "optim/adagrad.cc"
#include "base/simd_targets.h"
//
#include "hwy/foreach_target.h"
//
#include "loop-inl.h"

HWY_BEFORE_NAMESPACE();
namespace ferry::optim::HWY_NAMESPACE {

struct Adagrad {
    static constexpr bool kM = true, kV = false, kSquares = true;
    HWY_INLINE static void apply(VF& p, VF& m, VF&, VF g, const Scalars& s) {
        g = decayed(g, p, s);
        m = flush(hn::Add(m, hn::Mul(g, g)), kLeastMoment);
        const VF divisor = hn::Add(hn::Sqrt(m), set(s.eps));
        p = hn::Sub(p, hn::Div(hn::Mul(g, set(s.step_size)), divisor));
    }
};

const char* run_adagrad(const Span& span, const Scalars& s, Stores stores) {
    return run_rule<Adagrad>(span, s, stores);
}

}  // namespace ferry::optim::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace ferry::optim {

HWY_EXPORT(run_adagrad);
const char* update_adagrad(const Span& span, const Scalars& scalars, Stores stores) {
    return HWY_DYNAMIC_DISPATCH(run_adagrad)(span, scalars, stores);
}

}  // namespace ferry::optim
#endif
