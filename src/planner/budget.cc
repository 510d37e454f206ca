#include "budget.h"

#include <algorithm>

namespace ferry::planner {

void Budget::need(const RowName& row, int64_t bytes) {
    spent_ += bytes;
    const auto found = std::ranges::find_if(
        rows_, [&](const TierRow& r) { return r.kind == row.kind && r.what == row.what; });
    if (found == rows_.end()) {
        rows_.push_back({tier_, row.kind, row.what, bytes});
    } else {
        found->bytes += bytes;
    }
}

bool Budget::take(const RowName& row, int64_t bytes) {
    if (bytes > limit_ - spent_) return false;
    need(row, bytes);
    return true;
}

Budget nvme_budget(const PlanRequest& request) {
    int64_t total = 0;
    for (const NvmePath& path : request.budgets.nvme) {
        const bool unlimited = path.size_bytes == kUnlimited || total == kUnlimited;
        total = unlimited ? kUnlimited : total + path.size_bytes;
    }
    return {swap::Tier::nvme, total, request.sharers};
}

std::string needed_text(const Budget& budget, int64_t bytes) {
    const int64_t of_all = budget.sharers() * bytes;
    std::string text = format_bytes(of_all) + " needed (" + std::to_string(of_all) + " bytes)";
    if (budget.sharers() == 1) return text;
    return text + ", by the " + std::to_string(budget.sharers()) +
           " ranks of the host that share it";
}

void refuse(const Budget& budget, int64_t smallest, const std::string& what,
            const std::string& otherwise) {
    const std::string needed = needed_text(budget, smallest);
    const int64_t limit = budget.sharers() * budget.limit();
    smallest *= budget.sharers();
    const std::string key = "budgets." + std::string(swap::name_of(budget.tier()));
    const std::string larger = "set " + key + " to " + std::to_string(smallest) + " or more";
    throw DoesNotFit({.what = what,
                      .where = key,
                      .measured = needed,
                      .limit = format_bytes(limit) + ", " + format_bytes(smallest - limit) + " (" +
                               std::to_string(smallest - limit) + " bytes) missing",
                      .remedy = larger + ", or " + otherwise},
                     budget.tier(), smallest, larger);
}

}  // namespace ferry::planner
