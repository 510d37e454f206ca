// Notes of operations that no fast library took, made when their scratch is asked for.
#pragma once

#include <string>
#include <vector>

#include "ops/slow_paths.h"

namespace ferry::ops::cuda {

class SlowPathNotes {
public:
    void note(const Attention& shape, bool backward, const std::string& why);
    void note(const Gemm& shape);
    const std::vector<SlowPath>& all() const { return all_; }

private:
    void add(SlowPath path);
    std::vector<SlowPath> all_{};
};

}  // namespace ferry::ops::cuda
