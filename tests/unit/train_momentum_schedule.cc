// Which updates 1-bit and 0/1 Adam make of what, beside their rules followed step by step.
#include "train/step/momentum_schedule.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <set>

namespace ferry::train {
namespace {

OptimizerConfig zeroone(int64_t freeze, int64_t changes, int64_t local, int64_t most) {
    return {.method = optim::Method::zeroone_adam,
            .var_freeze_step = freeze,
            .var_update_scaler = changes,
            .local_step_scaler = local,
            .local_step_clipper = most};
}

// T_v of the paper: k_(j+1) - k_j = 2^floor(j / kappa).
std::set<int64_t> changes_of(const OptimizerConfig& o) {
    std::set<int64_t> found;
    int64_t j = 0;
    for (int64_t at = 1; at <= o.var_freeze_step; at += int64_t{1} << (j++ / o.var_update_scaler))
        found.insert(at);
    return found;
}

// An exchange each `apart` updates; after local_step_scaler of them, with an exchange, it doubles.
std::set<int64_t> exchanges_of(const OptimizerConfig& o, int64_t updates) {
    std::set<int64_t> found;
    int64_t apart = 1, since = 0, of_apart = 0;
    for (int64_t update = o.var_freeze_step + 1; update <= updates; ++update) {
        ++since;
        ++of_apart;
        const bool grows = apart < o.local_step_clipper && of_apart == o.local_step_scaler;
        if (since == apart || grows) {
            found.insert(update);
            since = 0;
        }
        if (!grows) continue;
        apart = std::min(2 * apart, o.local_step_clipper);
        of_apart = 0;
    }
    return found;
}

TEST(MomentumSchedule, FollowsTheRulesOfZerooneAdam) {
    constexpr int64_t kUpdates = 400;
    for (const OptimizerConfig& o :
         {zeroone(100, 16, 32678, 1), zeroone(40, 8, 14, 4), zeroone(3, 16, 5, 16),
          zeroone(90, 1, 7, 6), zeroone(1, 1, 1, 3), zeroone(17, 16, 10, 16)}) {
        SCOPED_TRACE(testing::Message() << o.var_freeze_step << " " << o.var_update_scaler << " "
                                        << o.local_step_scaler << " " << o.local_step_clipper);
        const MomentumSchedule schedule(o);
        const std::set<int64_t> changes = changes_of(o), exchanges = exchanges_of(o, kUpdates);
        int64_t changed = 0, begin = 1, first = 0;
        std::array<int64_t, kExchanged> of_each{};
        for (int64_t update = 1; update <= kUpdates; ++update) {
            SCOPED_TRACE(update);
            const bool in_full = changes.contains(update);
            const bool exchanged = update <= o.var_freeze_step || exchanges.contains(update);
            changed += in_full;
            EXPECT_EQ(schedule.of(update), in_full     ? Exchanged::gradients
                                           : exchanged ? Exchanged::momentum
                                                       : Exchanged::nothing);
            ++of_each[static_cast<size_t>(schedule.of(update))];
            EXPECT_EQ(schedule.of_each(update), of_each);
            EXPECT_EQ(schedule.changes_of_variance(update), changed);
            EXPECT_EQ(schedule.interval_begin(update), begin);
            if (exchanged) begin = update + 1;
            if (!in_full && first == 0) first = update;
        }
        EXPECT_EQ(schedule.first(), first);
    }
}

TEST(MomentumSchedule, HasOneBorderOfOnebitAdam) {
    const MomentumSchedule schedule(
        {.method = optim::Method::onebit_adam, .freeze_step = 5, .local_step_clipper = 4});
    for (int64_t update = 1; update <= 20; ++update) {
        EXPECT_EQ(schedule.of(update), update <= 5 ? Exchanged::gradients : Exchanged::momentum);
        EXPECT_EQ(schedule.changes_of_variance(update), std::min<int64_t>(update, 5));
        EXPECT_EQ(schedule.interval_begin(update), update);
    }
    EXPECT_EQ(schedule.of_each(4), (std::array<int64_t, 3>{4, 0, 0}));
    EXPECT_EQ(schedule.of_each(20), (std::array<int64_t, 3>{5, 15, 0}));
    EXPECT_EQ(schedule.first(), 6);
}

TEST(MomentumSchedule, LeavesOtherMethodsAlone) {
    const MomentumSchedule schedule(OptimizerConfig{});
    for (const int64_t update : {1, 2, 1000}) {
        EXPECT_EQ(schedule.of(update), Exchanged::gradients);
        EXPECT_EQ(schedule.changes_of_variance(update), update);
        EXPECT_EQ(schedule.of_each(update), (std::array<int64_t, 3>{update, 0, 0}));
    }
    EXPECT_GT(schedule.first(), int64_t{1} << 60);
}

}  // namespace
}  // namespace ferry::train
