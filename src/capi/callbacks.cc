#include "callbacks.h"

namespace ferry::capi {
namespace {

thread_local const InCallback* t_innermost = nullptr;

}  // namespace

InCallback::InCallback(const void* object) noexcept : object_(object), around_(t_innermost) {
    t_innermost = this;
}

InCallback::~InCallback() { t_innermost = around_; }

bool InCallback::of(const void* object) noexcept {
    for (const InCallback* one = t_innermost; one; one = one->around_)
        if (one->object_ == object) return true;
    return false;
}

const void* any_engine() noexcept {
    static constexpr char kMark = 0;
    return &kMark;
}

}  // namespace ferry::capi
