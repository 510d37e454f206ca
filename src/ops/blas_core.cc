// OpenBLAS chooses its kernels by the processor's model number when it is loaded; a processor newer
// than the library gets the oldest ones.
#include <openblas_config.h>
//
#include <cblas.h>

#include <algorithm>
#include <array>
#include <string_view>

#include "ops/ops.h"

namespace ferry::ops {

std::string better_blas_core() {
#ifdef __x86_64__
    constexpr std::array<std::string_view, 3> kWide = {"SkylakeX", "Cooperlake", "Sapphirerapids"};
    constexpr std::array<std::string_view, 2> kAvx2 = {"Haswell", "Zen"};
    const std::string_view chosen = openblas_get_corename();
    const auto among = [chosen](const auto& cores) {
        return std::ranges::find(cores, chosen) != cores.end();
    };
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") &&
        __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl"))
        return among(kWide) ? "" : "SkylakeX";
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"))
        return among(kAvx2) || among(kWide) ? "" : "Haswell";
#endif
    return {};
}

}  // namespace ferry::ops
