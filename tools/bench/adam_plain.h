// The loop one would write by hand for one processor: what ferry's own is measured against. AdamW
// with fused multiply-add, no unscaling, no flushing of tiny values, whole vectors only.
#pragma once

#include <cstdint>

#include "ferry/dtype.h"

namespace ferry::tools {

struct PlainArrays {
    int64_t count = 0;                  // a multiple of 16
    const void* gradient = nullptr;     // all arrays aligned to 64 bytes
    DType gradient_type = DType::bf16;  // any
    const float* p_in = nullptr;
    const float* m_in = nullptr;
    const float* v_in = nullptr;
    float* p = nullptr;
    float* m = nullptr;
    float* v = nullptr;
    uint16_t* weight = nullptr;
    DType weight_type = DType::bf16;  // bf16 or f16
};

enum class Stores : uint8_t { plain, non_temporal };

// "avx512", "avx2", or nullptr where this processor has neither.
const char* plain_kind();
// Elements [begin, begin + count) on the calling thread.
void plain_adamw(const PlainArrays& arrays, int64_t begin, int64_t count, Stores stores);
// a[i] = b[i] + 3 * c[i], the yardstick of memory speed; non-temporal stores.
void plain_triad(float* a, const float* b, const float* c, int64_t count);
// Sum of squares in no particular order.
float plain_squares(const float* values, int64_t count);

}  // namespace ferry::tools
