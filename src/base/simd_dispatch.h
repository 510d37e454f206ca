// The SIMD targets of this process, behind Highway's dispatch: all modules run the same one. For
// sources and tests that see Highway's headers.
#pragma once

#include <algorithm>
#include <string>
#include <string_view>
#include <vector>

#include "base/simd_targets.h"
#include "ferry/error.h"
//
#include <hwy/targets.h>

namespace ferry {

// The ones this CPU runs, best first, by Highway's names.
inline std::vector<std::string> simd_targets() {
    std::vector<std::string> names;
    for (const int64_t target : hwy::SupportedAndGeneratedTargets())
        names.emplace_back(hwy::TargetName(target));
    return names;
}

// For tests and benchmarks, while nothing else runs. "" undoes.
inline void force_simd_target(std::string_view name) {
    hwy::SetSupportedTargetsForTest(0);
    if (!name.empty()) {
        const auto all = hwy::SupportedAndGeneratedTargets();
        const auto found = std::ranges::find(all, name, hwy::TargetName);
        FERRY_CHECK(found != all.end(), name);
        hwy::SetSupportedTargetsForTest(*found);
    }
    hwy::GetChosenTarget().Update(hwy::SupportedTargets());
}

}  // namespace ferry
