// What the files of this module share.
#pragma once

#include "ferry/optim.h"

namespace ferry::optim {

// Magnitudes below these count as zero: of a gradient, of a kept moment.
constexpr float kLeastGradient = 0x1p-60f;
constexpr float kLeastMoment = 0x1p-100f;

// Aborts unless the span holds what the method needs, and nothing overlaps by half.
void check_span(const Span& span, const Scalars& scalars);

// The elements [begin, begin + count) of a span.
Span part_of(const Span& span, int64_t begin, int64_t count);

// One entry a method, defined beside its formula; each picks the best SIMD target by itself.
// `stream`: write p, m, v and the weight past the caches. Only for spans that are aligned to it.
void update_adamw(const Span& span, const Scalars& scalars, bool stream);
void update_adam(const Span& span, const Scalars& scalars, bool stream);
void update_sgd(const Span& span, const Scalars& scalars, bool stream);
void update_lion(const Span& span, const Scalars& scalars, bool stream);
void update_adagrad(const Span& span, const Scalars& scalars, bool stream);

}  // namespace ferry::optim
