// Whole runs of one to four ranks: their number changes no more than the rounding of gradients.
#include <gtest/gtest.h>

#include <string>

#include "tests/contract/train_ranks_fixture.h"
#include "tests/support/tiny_run.h"

namespace ferry::train::of_ranks {
namespace {

class EachNumber : public Ranks, public testing::WithParamInterface<int> {
    int ranks() const override { return GetParam(); }
};

TEST_P(EachNumber, OfRanksGivesTheSameBitsAtEveryStageAndOnEveryTier) {
    expect_stages_equal(config(), GetParam());
}

// Their gradients are rounded to fp32 once more, and added in another order.
TEST_P(EachNumber, OfRanksFollowsTheRunOfOne) {
    const Config config = this->config();
    const Outcome several = run(config, GetParam());
    const Outcome one = alone(config);
    EXPECT_NEAR(several.before.loss, one.before.loss, 1e-14);
    EXPECT_EQ(several.before.targets, one.before.targets);
    EXPECT_NEAR(several.reports[0].loss, one.reports[0].loss, 1e-14);
    int clipped = 0;
    for (size_t i = 0; i < one.reports.size(); ++i) {
        EXPECT_EQ(several.reports[i].targets, one.reports[i].targets);
        EXPECT_EQ(several.reports[i].tokens, one.reports[i].tokens);
        EXPECT_NEAR(several.reports[i].loss, one.reports[i].loss, 2e-6 * one.reports[i].loss);
        EXPECT_NEAR(several.reports[i].gradient_norm, one.reports[i].gradient_norm,
                    1e-5 * one.reports[i].gradient_norm);
        clipped += one.reports[i].clip_factor < 1;
    }
    EXPECT_GT(clipped, 0);
    EXPECT_NEAR(several.after.loss, one.after.loss, 2e-6 * one.after.loss);
}

// Each rank has whole matrices, and so there is nothing but that rounding between them too; what it
// is to a singular value near zero is more to its direction.
TEST_P(EachNumber, OfRanksWithWholeMatricesFollowsTheRunOfOne) {
    Config config = this->config();
    config.optimizer = muon();
    const Outcome several = run(config, GetParam());
    const Outcome one = alone(config);
    EXPECT_NEAR(several.reports[0].loss, one.reports[0].loss, 1e-14);
    for (size_t i = 0; i < one.reports.size(); ++i)
        EXPECT_NEAR(several.reports[i].loss, one.reports[i].loss, 1e-4 * one.reports[i].loss);
    EXPECT_NEAR(several.after.loss, one.after.loss, 1e-4 * one.after.loss);
    EXPECT_NE(one.after.loss, one.before.loss);
}

TEST_P(EachNumber, OfRanksWithWholeMatricesGivesTheSameBitsAtEveryStage) {
    Config config = this->config();
    config.optimizer = muon();
    expect_stages_equal(config, GetParam());
}

INSTANTIATE_TEST_SUITE_P(numbers, EachNumber, testing::Values(1, 2, 3, 4),
                         [](const auto& ranks) { return std::to_string(ranks.param); });

}  // namespace
}  // namespace ferry::train::of_ranks
