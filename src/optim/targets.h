// Which SIMD targets this module is compiled for; before any Highway header.
#pragma once

// SSSE3 brings nothing over the baseline here, and AVX3_DL nothing over AVX3.
#define HWY_DISABLED_TARGETS (HWY_SSSE3 | HWY_AVX3_DL)
