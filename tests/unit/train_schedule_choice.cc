// Which of several schedules is taken, and what is said of it.
#include "train/prediction/schedule_choice.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace ferry::train {
namespace {

using testing::Eq;
using testing::Optional;
using enum PipelineSchedule;

ScheduleOffer taking(PipelineSchedule schedule, double seconds) {
    return {.schedule = schedule, .seconds = seconds, .waits = 0.25};
}
ScheduleOffer refused(PipelineSchedule schedule) {
    return {.schedule = schedule,
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

TEST(ScheduleChoice, IsOfSeveralStagesAlone) {
    Config config;
    EXPECT_FALSE(chooses_schedule(config));
    config.parallel.pipeline = 2;
    EXPECT_TRUE(chooses_schedule(config));
    for (const PipelineSchedule schedule : schedules_to_choose(config)) {
        EXPECT_FALSE(chooses_schedule(with_schedule(config, schedule)));
        EXPECT_NE(name_of(schedule), "auto");
    }
}

}  // namespace
}  // namespace ferry::train
