// Defines run_best<Method::FERRY_METHOD>() of internal.h for every SIMD target. A file a method
// includes it, so that the methods compile side by side: each takes about a minute.
#ifndef FERRY_METHOD
#error "define FERRY_METHOD, a value of Method, first"
#endif
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "optim/dispatch-inl.h"
#include "base/simd_targets.h"
//
#include "hwy/foreach_target.h"
//
#include "internal.h"
#include "rules-inl.h"

// Only a method's one source file includes this.
// NOLINTBEGIN(misc-definitions-in-headers)

HWY_BEFORE_NAMESPACE();
namespace ferry::optim::HWY_NAMESPACE {
namespace {  // the same name in each file

const char* run(const Span& span, const Scalars& s, Stores stores) {
    return run_method<Method::FERRY_METHOD>(span, s, stores);
}

}  // namespace
}  // namespace ferry::optim::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace ferry::optim {

HWY_EXPORT(run);
template <>
const char* run_best<Method::FERRY_METHOD>(const Span& span, const Scalars& scalars,
                                           Stores stores) {
    return HWY_DYNAMIC_DISPATCH(run)(span, scalars, stores);
}

}  // namespace ferry::optim
#endif
// NOLINTEND(misc-definitions-in-headers)
