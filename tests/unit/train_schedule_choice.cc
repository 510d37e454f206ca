// Which of several schedules is taken, and what is said of it.
#include "train/prediction/schedule_choice.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "train/prediction/simulated_stages.h"

namespace ferry::train {
namespace {

using testing::Eq;
using testing::Optional;
using enum PipelineSchedule;

ScheduleOffer taking(PipelineSchedule schedule, double seconds) {
    return {.order = {schedule}, .seconds = seconds, .waits = 0.25};
}
ScheduleOffer refused(PipelineSchedule schedule) {
    return {.order = {schedule},
            .refusal = Error(Trouble::does_not_fit, {.what = "no room (stage 1 of 2)",
                                                     .where = "budgets.device",
                                                     .measured = "3 MiB",
                                                     .limit = "2 MiB",
                                                     .remedy = "raise it"})};
}
std::optional<size_t> fastest(const std::vector<ScheduleOffer>& offers) {
    return fastest_of(offers);
}

TEST(ScheduleChoice, TakesTheFastest) {
    EXPECT_THAT(fastest({taking(one_f_one_b, 2), taking(zero_bubble, 1)}), Optional(Eq(1u)));
    EXPECT_THAT(fastest({taking(one_f_one_b, 1), taking(zero_bubble, 2)}), Optional(Eq(0u)));
}

// The earlier ones of the list take less memory, and the simulation errs by more than this.
TEST(ScheduleChoice, TakesTheFirstOfThoseThatAreAsFast) {
    EXPECT_THAT(fastest({taking(one_f_one_b, 1), taking(zero_bubble, 1)}), Optional(Eq(0u)));
    EXPECT_THAT(fastest({taking(one_f_one_b, 1.009), taking(zero_bubble, 1)}), Optional(Eq(0u)));
    EXPECT_THAT(fastest({taking(one_f_one_b, 1.011), taking(zero_bubble, 1)}), Optional(Eq(1u)));
}

TEST(ScheduleChoice, TakesNoneThatIsRefused) {
    EXPECT_THAT(fastest({refused(one_f_one_b), taking(zero_bubble, 9)}), Optional(Eq(1u)));
    EXPECT_THAT(fastest({taking(one_f_one_b, 9), refused(zero_bubble)}), Optional(Eq(0u)));
    EXPECT_EQ(fastest({refused(one_f_one_b), refused(zero_bubble)}), std::nullopt);
    EXPECT_EQ(fastest({}), std::nullopt);
}

TEST(ScheduleChoice, SaysWhy) {
    EXPECT_EQ(
        text_of({.offers = {taking(one_f_one_b, 2), taking(zero_bubble, 1)}, .chosen = 1}),
        "zero_bubble, the fastest as simulated: 1f1b 2 s a step, of which a stage waits up to "
        "25.0 %; zero_bubble 1 s a step, of which a stage waits up to 25.0 %");
    EXPECT_THAT(
        text_of({.offers = {taking(one_f_one_b, 1.005), taking(zero_bubble, 1)}, .chosen = 0}),
        testing::StartsWith("1f1b, within 1 % of the fastest as simulated: "));
    EXPECT_EQ(text_of({.offers = {taking(one_f_one_b, 2), refused(zero_bubble)}, .chosen = 0}),
              "1f1b, which alone can be: 1f1b 2 s a step, of which a stage waits up to 25.0 %; not "
              "zero_bubble: no room (stage 1 of 2): 3 MiB, limit 2 MiB");
}

// By the visits of all stages, and never where two short steps take as long.
TEST(ScheduleChoice, ShortStepsFillAllStages) {
    constexpr int64_t kBlocks = 8;
    planner::Plan plan;
    plan.layers.assign(kBlocks, {.kind = model::LayerKind::block, .elements = 1});
    const auto of = [&](int64_t groups) {
        plan.micro_batches = plan.groups = groups;
        return short_steps_of(std::vector{plan, plan});
    };
    constexpr int64_t kTo = kMostVisits / (2 * kBlocks), kFrom = kTo - 2;
    EXPECT_FALSE(of(kFrom + kTo));
    const auto steps = of(kFrom + kTo + 1);
    ASSERT_TRUE(steps);
    EXPECT_EQ(steps->from, kFrom);
    EXPECT_EQ(steps->to, kTo);
    EXPECT_DOUBLE_EQ(steps->at_all(7, 9), 9 + static_cast<double>(kFrom + 1));
    // However many visits that are.
    const auto few = short_steps_of(std::vector{plan, plan}, 0);
    ASSERT_TRUE(few);
    EXPECT_EQ(few->from, 2);
    EXPECT_EQ(few->to, 4);
}

TEST(ScheduleChoice, SaysWhereAStepIsLong) {
    EXPECT_THAT(text_of({.offers = {taking(one_f_one_b, 2), taking(zero_bubble, 1)},
                         .chosen = 1,
                         .is_long = true}),
                testing::StartsWith("zero_bubble, the fastest as simulated by shorter steps, as a "
                                    "step is long: "));
}

// Where no rank's plans of the others could be made, nothing is called the fastest.
TEST(ScheduleChoice, SaysWhereNoneWasSimulated) {
    EXPECT_THAT(text_of({.offers = {refused(one_f_one_b), refused(zero_bubble)}, .chosen = 1}),
                testing::StartsWith("zero_bubble, the first that the ranks have room for; none was "
                                    "simulated: not 1f1b: no room"));
}

TEST(ScheduleChoice, NamesVirtualStages) {
    EXPECT_EQ(name_of(StageOrder{interleaved, 4}), "interleaved 4");
    EXPECT_EQ(name_of(StageOrder{round_robin, 1}), "round_robin");
}

TEST(ScheduleChoice, IsOfSeveralStagesAlone) {
    Config config;
    EXPECT_FALSE(chooses_schedule(config));
    config.parallel.pipeline = 2;
    EXPECT_TRUE(chooses_schedule(config));
    for (const StageOrder& order : orders_to_choose(config, 8)) {
        EXPECT_FALSE(chooses_schedule(with_order(config, order)));
        EXPECT_NE(name_of(order.schedule), "auto");
    }
    config.parallel.schedule = round_robin;
    EXPECT_FALSE(chooses_schedule(config));
    config.parallel.virtual_stages = std::nullopt;
    EXPECT_TRUE(chooses_schedule(config));
}

TEST(ScheduleChoice, IsAmongNumbersOfVirtualStagesWhereTheyAreAuto) {
    Config config;
    config.parallel.pipeline = 2;
    const auto orders = [&](int64_t blocks) { return orders_to_choose(config, blocks); };
    using testing::ElementsAre;
    using O = StageOrder;
    EXPECT_THAT(orders(8), ElementsAre(O{one_f_one_b, 1}, O{zero_bubble, 1}, O{round_robin, 1}));
    config.parallel.virtual_stages = 3;
    EXPECT_THAT(orders(8), ElementsAre(O{interleaved, 3}, O{round_robin, 3}));
    config.parallel.virtual_stages = std::nullopt;
    // Six blocks a stage: 4 does not divide them, and one block a run makes six.
    EXPECT_THAT(orders(12), ElementsAre(O{one_f_one_b, 1}, O{zero_bubble, 1}, O{interleaved, 2},
                                        O{round_robin, 1}, O{round_robin, 2}, O{round_robin, 6}));
    for (const StageOrder& order : orders(64)) {
        EXPECT_TRUE(order.virtual_stages <= kMostVirtualStages || order == (O{round_robin, 32}));
        EXPECT_EQ(32 % order.virtual_stages, 0);
    }
    // Stages that are not alike have one run each.
    EXPECT_THAT(orders(9), ElementsAre(O{one_f_one_b, 1}, O{zero_bubble, 1}, O{round_robin, 1}));
    config.parallel.schedule = interleaved;
    EXPECT_THAT(orders(16), ElementsAre(O{interleaved, 2}, O{interleaved, 4}, O{interleaved, 8}));
    EXPECT_THAT(orders(9), ElementsAre(O{interleaved, 2}));
    config.parallel.schedule = zero_bubble;
    EXPECT_THAT(orders(16), ElementsAre(O{zero_bubble, 1}));
}

}  // namespace
}  // namespace ferry::train
