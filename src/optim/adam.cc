// Adam with L2 decay for every SIMD target.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "optim/adam.cc"
#include "base/simd_targets.h"
//
#include "hwy/foreach_target.h"
//
#include "loop-inl.h"

HWY_BEFORE_NAMESPACE();
namespace ferry::optim::HWY_NAMESPACE {

struct Adam {
    static constexpr bool kM = true, kV = true, kSquares = false;
    HWY_INLINE static void apply(VF& p, VF& m, VF& v, VF g, const Scalars& s) {
        adam_step(p, m, v, decayed(g, p, s), s);
    }
};

const char* run_adam(const Span& span, const Scalars& s, Stores stores) {
    return run_rule<Adam>(span, s, stores);
}

}  // namespace ferry::optim::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace ferry::optim {

HWY_EXPORT(run_adam);
const char* update_adam(const Span& span, const Scalars& scalars, Stores stores) {
    return HWY_DYNAMIC_DISPATCH(run_adam)(span, scalars, stores);
}

}  // namespace ferry::optim
#endif
