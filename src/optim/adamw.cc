// AdamW for every SIMD target.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "optim/adamw.cc"
#include "base/simd_targets.h"
//
#include "hwy/foreach_target.h"
//
#include "loop-inl.h"

HWY_BEFORE_NAMESPACE();
namespace ferry::optim::HWY_NAMESPACE {

struct AdamW {
    static constexpr bool kM = true, kV = true, kSquares = false;
    HWY_INLINE static void apply(VF& p, VF& m, VF& v, VF g, const Scalars& s) {
        adam_step(p, m, v, g, s);
    }
};

const char* run_adamw(const Span& span, const Scalars& s, Stores stores) {
    return run_rule<AdamW>(span, s, stores);
}

}  // namespace ferry::optim::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace ferry::optim {

HWY_EXPORT(run_adamw);
const char* update_adamw(const Span& span, const Scalars& scalars, Stores stores) {
    return HWY_DYNAMIC_DISPATCH(run_adamw)(span, scalars, stores);
}

}  // namespace ferry::optim
#endif
