#include "ops/slow_paths.h"

namespace ferry::ops {

std::vector<SlowPath> slow_paths(const Ops& ops) {
    const auto* known = dynamic_cast<const KnowsSlowPaths*>(&ops);
    return known == nullptr ? std::vector<SlowPath>{} : known->slow_paths();
}

}  // namespace ferry::ops
