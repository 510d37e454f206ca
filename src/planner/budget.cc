#include "budget.h"

#include <algorithm>

namespace ferry::planner {

void Budget::need(const std::string& what, int64_t bytes) {
    spent_ += bytes;
    const auto row =
        std::find_if(rows_.begin(), rows_.end(), [&](const TierRow& r) { return r.what == what; });
    if (row == rows_.end()) {
        rows_.push_back({tier_, what, bytes});
    } else {
        row->bytes += bytes;
    }
}

bool Budget::take(const std::string& what, int64_t bytes) {
    if (bytes > limit_ - spent_) return false;
    need(what, bytes);
    return true;
}

}  // namespace ferry::planner
