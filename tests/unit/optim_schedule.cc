#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>

#include "ferry/optim.h"

namespace ferry::optim {
namespace {

LrSchedule schedule(Decay kind) {
    return {.kind = kind,
            .peak = 2,
            .final_fraction = 0.1,
            .warmup_steps = 10,
            .total_steps = 110,
            .decay_steps = 20};
}

TEST(Schedule, warms_up_linearly_to_the_peak) {
    for (const Decay kind : {Decay::constant, Decay::linear, Decay::cosine, Decay::wsd}) {
        const LrSchedule s = schedule(kind);
        EXPECT_DOUBLE_EQ(learning_rate(s, 1), 0.2);
        EXPECT_DOUBLE_EQ(learning_rate(s, 5), 1);
        EXPECT_DOUBLE_EQ(learning_rate(s, 10), 2);
    }
}

TEST(Schedule, falls_as_named) {
    EXPECT_DOUBLE_EQ(learning_rate(schedule(Decay::constant), 100000), 2);
    EXPECT_DOUBLE_EQ(learning_rate(schedule(Decay::linear), 60), 2 * 0.55);
    EXPECT_DOUBLE_EQ(learning_rate(schedule(Decay::cosine), 60), 2 * 0.55);
    EXPECT_DOUBLE_EQ(learning_rate(schedule(Decay::cosine), 35),
                     2 * (0.1 + 0.9 * (1 + std::cos(M_PI / 4)) / 2));
    EXPECT_DOUBLE_EQ(learning_rate(schedule(Decay::wsd), 90), 2);
    EXPECT_DOUBLE_EQ(learning_rate(schedule(Decay::wsd), 100), 2 * 0.55);
}

TEST(Schedule, ends_at_the_final_fraction_and_stays) {
    for (const Decay kind : {Decay::linear, Decay::cosine, Decay::wsd, Decay::one_cycle}) {
        EXPECT_NEAR(learning_rate(schedule(kind), 110), 0.2, 1e-15);
        EXPECT_NEAR(learning_rate(schedule(kind), 100000), 0.2, 1e-15);
    }
}

TEST(Schedule, one_cycle_rises_from_its_minimum) {
    const LrSchedule s = schedule(Decay::one_cycle);
    EXPECT_DOUBLE_EQ(learning_rate(s, 5), 2 * 0.55);
    EXPECT_DOUBLE_EQ(learning_rate(s, 10), 2);
    EXPECT_DOUBLE_EQ(learning_rate(s, 60), 2 * 0.55);
}

// deepspeed.runtime.lr_schedules.WarmupDecayLR with warmup_min_lr 0.2, warmup_max_lr 2,
// warmup_num_steps 10, total_num_steps 110; its iteration is our step - 1.
TEST(Schedule, warmup_decay_is_deepspeeds) {
    LrSchedule s = schedule(Decay::warmup_decay);
    EXPECT_DOUBLE_EQ(learning_rate(s, 1), 0.2);
    EXPECT_DOUBLE_EQ(learning_rate(s, 6), 0.2 + 1.8 * 5 / 10);
    EXPECT_DOUBLE_EQ(learning_rate(s, 11), 2);
    EXPECT_DOUBLE_EQ(learning_rate(s, 61), 0.2 + 1.8 * (110 - 60) / 100);
    EXPECT_DOUBLE_EQ(learning_rate(s, 111), 0.2);
    s.log_warmup = true;
    EXPECT_DOUBLE_EQ(learning_rate(s, 1), 0.2);
    EXPECT_DOUBLE_EQ(learning_rate(s, 4), 0.2 + 1.8 * std::log(4) / std::log(10));
    EXPECT_DOUBLE_EQ(learning_rate(s, 11), 2);
}

TEST(Schedule, without_warm_up_starts_at_the_peak_side) {
    for (const Decay kind : {Decay::constant, Decay::linear, Decay::cosine, Decay::one_cycle}) {
        LrSchedule s = schedule(kind);
        s.warmup_steps = 0;
        EXPECT_GT(learning_rate(s, 1), 1.98);
        EXPECT_LE(learning_rate(s, 1), 2);
    }
}

TEST(Schedule, never_leaves_its_range_and_never_jumps) {
    for (const Decay kind : {Decay::constant, Decay::linear, Decay::cosine, Decay::wsd,
                             Decay::one_cycle, Decay::warmup_decay}) {
        const LrSchedule s = schedule(kind);
        double before = learning_rate(s, 1);
        for (int64_t step = 1; step < 300; ++step) {
            const double now = learning_rate(s, step);
            EXPECT_GE(now, 0.2 - 1e-12);
            EXPECT_LE(now, 2);
            EXPECT_LE(std::fabs(now - before), 0.21) << name_of(kind) << " at " << step;
            before = now;
        }
    }
}

std::string refused(const LrSchedule& s) {
    try {
        check(s);
    } catch (const Error& error) {
        EXPECT_EQ(error.trouble(), Trouble::usage);
        return error.problem().where;
    }
    return "";
}

TEST(Schedule, that_contradicts_itself_is_refused) {
    EXPECT_EQ(refused({}), "");
    EXPECT_EQ(refused(schedule(Decay::wsd)), "");
    EXPECT_EQ(refused({.peak = -1}), "scheduler.lr");
    EXPECT_EQ(refused({.peak = NAN}), "scheduler.lr");
    EXPECT_EQ(refused({.final_fraction = 1.5}), "scheduler.final_fraction");
    EXPECT_EQ(refused({.warmup_steps = -1}), "scheduler.warmup_steps");
    EXPECT_EQ(refused({.kind = Decay::linear}), "scheduler.total_steps");
    EXPECT_EQ(refused({.kind = Decay::cosine, .warmup_steps = 10, .total_steps = 10}),
              "scheduler.total_steps");
    EXPECT_EQ(refused({.kind = Decay::wsd, .total_steps = 10, .decay_steps = 11}),
              "scheduler.decay_steps");
    EXPECT_EQ(decay_from("wsd"), Decay::wsd);
    EXPECT_THROW(decay_from("cosin"), Error);
}

}  // namespace
}  // namespace ferry::optim
