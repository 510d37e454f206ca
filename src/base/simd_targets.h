// Which SIMD targets a module is compiled for; before any Highway header.
#pragma once

// SSSE3 brings nothing over the baseline here, AVX3_DL nothing over AVX3. Processors without AVX2
// are of before 2013 and take the baseline: a target less is a fifth less to compile.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
// A sanitizer's build takes minutes a target and finds the same in the baseline and in one more.
#define HWY_DISABLED_TARGETS (HWY_SSSE3 | HWY_SSE4 | HWY_AVX3 | HWY_AVX3_DL)
#else
#define HWY_DISABLED_TARGETS (HWY_SSSE3 | HWY_SSE4 | HWY_AVX3_DL)
#endif
