// The formulas of ferry/optim.h for one element on the GPU, with exact division and square root.
// Files that include this are compiled without contraction (cmake/cuda.cmake), and
// tests/tree/cuda_flags_test.py looks at what the compiler made of them.
#pragma once

#include "optim/internal.h"

namespace ferry::optim::cuda {

// The compiler's exact division and square root branch for every element to code for operands near
// the ends of the range, and so do one element after the other. These are the same operations for
// operands far from the ends, without a branch: those of all elements of a thread run side by side.
// Each ends in a remainder that a fused multiply-add knows exactly, which gives the correctly
// rounded result (Markstein 1990). `safe` becomes false where the operands are not of that range.
__device__ inline float fused(float a, float b, float c) {
    float sum;
    asm("fma.rn.f32 %0, %1, %2, %3;" : "=f"(sum) : "f"(a), "f"(b), "f"(c));
    return sum;
}

// Whether the bits lie in [least, most], of positive floats.
__device__ inline bool within(float value, float least, float most) {
    return __float_as_uint(value) - __float_as_uint(least) <=
           __float_as_uint(most) - __float_as_uint(least);
}

// 0 or 2^-100 to 2^100.
__device__ inline float root(float x, bool& safe) {
    float r;
    asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
    const bool zero = __float_as_uint(x) == 0;
    safe = safe && (zero || within(x, 0x1p-100f, 0x1p100f));
    const float near = x * r;
    const float exact = fused(fused(-near, near, x), r * 0.5f, near);
    return zero ? 0.0f : exact;
}

// a of 0 or 2^-90 to 2^60 in magnitude, b of 2^-60 to 2^30.
__device__ inline float quotient(float a, float b, bool& safe) {
    float r;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(b));
    const bool fits = __float_as_uint(a) == 0 || within(fabsf(a), 0x1p-90f, 0x1p60f);
    safe = safe && fits && within(b, 0x1p-60f, 0x1p30f);
    r = fused(r, fused(-b, r, 1.0f), r);
    const float near = fused(a, r, 0.0f);
    return fused(r, fused(-b, near, a), near);
}

// The compiler's, for any operands.
struct Exact {
    __device__ static float root(float x) { return sqrtf(x); }
    __device__ static float quotient(float a, float b) { return a / b; }
};
// The branchless ones, as long as they are safe.
struct Quick {
    bool safe = true;
    __device__ float root(float x) { return cuda::root(x, safe); }
    __device__ float quotient(float a, float b) { return cuda::quotient(a, b, safe); }
};

__device__ inline float flush(float value, float least) {
    return fabsf(value) < least ? 0.0f : value;
}

struct Element {
    float p, m, v;
};

template <class Math>
__device__ Element adam_step(Element e, float g, const Scalars& s, Math& math) {
    e.m = flush(e.m * s.beta1 + g * s.one_minus_beta1, kLeastMoment);
    e.v = flush(e.v * s.beta2 + (g * g) * s.one_minus_beta2, kLeastMoment);
    const float divisor = math.root(e.v) * s.inv_sqrt_bias2 + s.eps;
    e.p = e.p * s.decay - math.quotient(e.m * s.step_size, divisor);
    return e;
}

__device__ inline Element sgd_step(Element e, float g, const Scalars& s) {
    e.m = flush(e.m * s.beta1 + g, kLeastMoment);
    const float move = s.nesterov ? g + e.m * s.beta1 : e.m;
    e.p = e.p - move * s.step_size;
    return e;
}

__device__ inline Element lion_step(Element e, float g, const Scalars& s) {
    const float c = flush(e.m * s.beta1 + g * s.one_minus_beta1, kLeastMoment);
    const float sign = c > 0 ? 1.0f : c < 0 ? -1.0f : c;  // zero, or a NaN that stays one
    e.p = e.p * s.decay - sign * s.step_size;
    e.m = flush(e.m * s.beta2 + g * s.one_minus_beta2, kLeastMoment);
    return e;
}

template <class Math>
__device__ Element adagrad_step(Element e, float g, const Scalars& s, Math& math) {
    e.m = flush(e.m + g * g, kLeastMoment);
    e.p = e.p - math.quotient(g * s.step_size, math.root(e.m) + s.eps);
    return e;
}

template <Method kMethod, class Math>
__device__ Element step(Element e, float gradient, const Scalars& s, Math& math) {
    const float g = flush(gradient * s.gradient_scale, kLeastGradient);
    const float decayed = flush(g + e.p * s.weight_decay, kLeastGradient);
    if constexpr (kMethod == Method::adamw) return adam_step(e, g, s, math);
    if constexpr (kMethod == Method::adam) return adam_step(e, decayed, s, math);
    if constexpr (kMethod == Method::sgd) return sgd_step(e, decayed, s);
    if constexpr (kMethod == Method::lion) return lion_step(e, g, s);
    if constexpr (kMethod == Method::adagrad) return adagrad_step(e, decayed, s, math);
}

// Of int8 moments: m comes times this, and v times beta2.
template <Method kMethod>
__device__ float kept_m(const Scalars& s) {
    return kMethod == Method::lion || kMethod == Method::adagrad ? 1.0f : s.beta1;
}

__device__ inline Element coded_adam_step(Element e, float g, const Scalars& s) {
    e.m = fused(g, s.one_minus_beta1, e.m);
    e.v = fused(g * s.one_minus_beta2, g, e.v);
    const float divisor = fused(sqrtf(e.v), s.inv_sqrt_bias2, s.eps);
    e.p = fused(e.p, s.decay, -((e.m * s.step_size) / divisor));
    return e;
}

__device__ inline Element coded_sgd_step(Element e, float g, const Scalars& s) {
    e.m = e.m + g;
    const float move = s.nesterov ? fused(e.m, s.beta1, g) : e.m;
    e.p = fused(-move, s.step_size, e.p);
    return e;
}

__device__ inline Element coded_lion_step(Element e, float g, const Scalars& s) {
    const float c = fused(e.m, s.beta1, g * s.one_minus_beta1);
    const float sign = c > 0 ? 1.0f : c < 0 ? -1.0f : c;  // zero, or a NaN that stays one
    e.p = fused(e.p, s.decay, -(sign * s.step_size));
    e.m = fused(e.m, s.beta2, g * s.one_minus_beta2);
    return e;
}

__device__ inline Element coded_adagrad_step(Element e, float g, const Scalars& s) {
    e.m = fused(g, g, e.m);
    e.p = e.p - (g * s.step_size) / (sqrtf(e.m) + s.eps);
    return e;
}

template <Method kMethod>
__device__ Element coded_step(Element e, float gradient, const Scalars& s) {
    const float g = gradient * s.gradient_scale, decayed = fused(e.p, s.weight_decay, g);
    if constexpr (kMethod == Method::adamw) return coded_adam_step(e, g, s);
    if constexpr (kMethod == Method::adam) return coded_adam_step(e, decayed, s);
    if constexpr (kMethod == Method::sgd) return coded_sgd_step(e, decayed, s);
    if constexpr (kMethod == Method::lion) return coded_lion_step(e, g, s);
    if constexpr (kMethod == Method::adagrad) return coded_adagrad_step(e, decayed, s);
}

constexpr bool has_v(Method method) { return method == Method::adamw || method == Method::adam; }

}  // namespace ferry::optim::cuda
