// Spends a tier's budget item by item and remembers what for.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "planner/planner.h"

namespace ferry::planner {

class Budget {
public:
    // `sharers`: ranks that share the tier, each with as much. Refusals name the sum.
    Budget(swap::Tier tier, int64_t limit_bytes, int sharers = 1)
        : tier_(tier), limit_(limit_bytes), sharers_(sharers) {}
    // Takes the bytes if they are left.
    bool take(const RowName& row, int64_t bytes);
    // Takes the bytes in any case, for what the run cannot do without.
    void need(const RowName& row, int64_t bytes);
    swap::Tier tier() const { return tier_; }
    int64_t spent() const { return spent_; }
    int64_t limit() const { return limit_; }
    int sharers() const { return sharers_; }
    bool exceeded() const { return spent_ > limit_; }
    const std::vector<TierRow>& rows() const { return rows_; }

private:
    swap::Tier tier_;
    int64_t limit_, spent_ = 0;
    int sharers_;
    std::vector<TierRow> rows_;
};

// The sum of all paths.
Budget nvme_budget(const PlanRequest& request);

// "3 MiB needed (3145728 bytes)", where a rank needs so many. Where ranks share the budget it is
// the sum, and the text says so.
std::string needed_text(const Budget& budget, int64_t bytes);
// Throws DoesNotFit with what is missing of the `smallest` budget that works, in bytes.
[[noreturn]] void refuse(const Budget& budget, int64_t smallest, const std::string& what,
                         const std::string& otherwise);

}  // namespace ferry::planner
