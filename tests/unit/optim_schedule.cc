#include <gtest/gtest.h>

#include <cmath>
#include <span>

#include "ferry/error.h"
#include "ferry/learning_rate.h"

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
        EXPECT_DOUBLE_EQ(learning_rate(s, 11), 2) << "where the fall begins";
    }
}

TEST(Schedule, warms_up_as_a_logarithm) {
    LrSchedule s = schedule(Decay::constant);
    s.log_warmup = true;
    EXPECT_DOUBLE_EQ(learning_rate(s, 1), 0);
    EXPECT_DOUBLE_EQ(learning_rate(s, 4), 2 * std::log(4) / std::log(10));
    EXPECT_DOUBLE_EQ(learning_rate(s, 10), 2);
}

TEST(Schedule, falls_as_named) {
    EXPECT_DOUBLE_EQ(learning_rate(schedule(Decay::constant), 100000), 2);
    EXPECT_DOUBLE_EQ(learning_rate(schedule(Decay::linear), 61), 2 * 0.55);
    EXPECT_DOUBLE_EQ(learning_rate(schedule(Decay::cosine), 61), 2 * 0.55);
    EXPECT_DOUBLE_EQ(learning_rate(schedule(Decay::cosine), 36),
                     2 * (0.1 + 0.9 * (1 + std::cos(M_PI / 4)) / 2));
    EXPECT_DOUBLE_EQ(learning_rate(schedule(Decay::wsd), 91), 2);
    EXPECT_DOUBLE_EQ(learning_rate(schedule(Decay::wsd), 92), 2 * (1 - 0.9 / 20));
    EXPECT_DOUBLE_EQ(learning_rate(schedule(Decay::wsd), 101), 2 * 0.55);
}

TEST(Schedule, ends_at_the_final_fraction_and_stays) {
    for (const Decay kind : {Decay::linear, Decay::cosine, Decay::wsd, Decay::one_cycle}) {
        EXPECT_NEAR(learning_rate(schedule(kind), 111), 0.2, 1e-15);
        EXPECT_NEAR(learning_rate(schedule(kind), 100000), 0.2, 1e-15);
    }
}

// A run of total_steps updates: each of them moves the weights.
TEST(Schedule, the_last_step_still_moves_when_the_fall_ends_at_zero) {
    for (const Decay kind : {Decay::linear, Decay::cosine, Decay::wsd}) {
        LrSchedule s = schedule(kind);
        s.final_fraction = 0;
        EXPECT_GT(learning_rate(s, 1), 0);
        EXPECT_GT(learning_rate(s, s.total_steps), 0) << name_of(kind);
        EXPECT_EQ(learning_rate(s, s.total_steps + 1), 0) << name_of(kind);
    }
}

// DeepSpeed 0.19.8: what the optimizer of each step had, with its engine's order (optimizer.step(),
// then scheduler.step()), minimum 0.2, maximum 2, warm-up 5 steps, 15 in all; OneCycle with first
// step size 5 and second 10.
TEST(Schedule, has_deepspeeds_numbers) {
    const double cycle[] = {0.2,  0.56, 0.92, 1.28, 1.64, 2.0,  1.82, 1.64, 1.46,
                            1.28, 1.1,  0.92, 0.74, 0.56, 0.38, 0.2,  0.2};
    const double linear[] = {0.2,  0.2,  0.56, 0.92, 1.28, 1.64, 2.0,  1.82, 1.64,
                             1.46, 1.28, 1.1,  0.92, 0.74, 0.56, 0.38, 0.2,  0.2};
    const double log[] = {0.2,  0.2,  0.975218, 1.428691, 1.750436, 2.0,  2.0,  1.82, 1.64,
                          1.46, 1.28, 1.1,      0.92,     0.74,     0.56, 0.38, 0.2,  0.2};
    LrSchedule s{.peak = 2, .final_fraction = 0.1, .warmup_steps = 5, .total_steps = 15};
    const auto expect = [&s](std::span<const double> rates) {
        for (size_t i = 0; i < rates.size(); ++i) {
            EXPECT_NEAR(learning_rate(s, static_cast<int64_t>(i) + 1), rates[i], 5e-7)
                << name_of(s.kind) << " at step " << i + 1;
        }
    };
    s.kind = Decay::one_cycle;
    expect(cycle);
    s.kind = Decay::warmup_decay;
    expect(linear);
    s.log_warmup = true;
    expect(log);
}

// transformers' get_linear_schedule_with_warmup and get_cosine_schedule_with_warmup, whose step
// counts from 0, in the part that falls.
TEST(Schedule, falls_as_transformers_does) {
    LrSchedule s = schedule(Decay::linear);
    s.final_fraction = 0;
    for (int64_t step = 11; step <= 110; ++step) {
        const double k = static_cast<double>(step - 1);
        s.kind = Decay::linear;
        EXPECT_NEAR(learning_rate(s, step), 2 * (110 - k) / (110 - 10), 1e-14);
        s.kind = Decay::cosine;
        EXPECT_NEAR(learning_rate(s, step), 2 * 0.5 * (1 + std::cos(M_PI * (k - 10) / 100)), 1e-14);
    }
}

TEST(Schedule, without_warm_up_starts_at_the_peak) {
    for (const Decay kind : {Decay::constant, Decay::linear, Decay::cosine, Decay::wsd,
                             Decay::one_cycle, Decay::warmup_decay}) {
        LrSchedule s = schedule(kind);
        s.warmup_steps = 0;
        EXPECT_DOUBLE_EQ(learning_rate(s, 1), 2) << name_of(kind);
        EXPECT_LE(learning_rate(s, 2), 2);
    }
}

// "set steps=5" of a run whose warm-up is longer: total_steps is then the warm-up's end.
TEST(Schedule, may_end_with_the_warm_up) {
    for (const Decay kind : {Decay::linear, Decay::cosine, Decay::wsd}) {
        const LrSchedule s{
            .kind = kind, .peak = 2, .warmup_steps = 10, .total_steps = 10, .decay_steps = 1};
        check(s);
        EXPECT_DOUBLE_EQ(learning_rate(s, 10), 2);
        EXPECT_EQ(learning_rate(s, 11), 0);
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
    EXPECT_EQ(refused({.peak = -1}), "optimizer.lr");
    EXPECT_EQ(refused({.peak = NAN}), "optimizer.lr");
    EXPECT_EQ(refused({.final_fraction = 1.5}), "schedule.final_fraction");
    EXPECT_EQ(refused({.warmup_steps = -1}), "schedule.warmup_steps");
    EXPECT_EQ(refused({.kind = Decay::linear}), "schedule.total_steps");
    EXPECT_EQ(refused({.kind = Decay::cosine, .warmup_steps = 10, .total_steps = 9}),
              "schedule.total_steps");
    EXPECT_EQ(refused({.kind = Decay::wsd, .total_steps = 10, .decay_steps = 11}),
              "schedule.decay_steps");
    EXPECT_EQ(refused({.kind = Decay::one_cycle, .total_steps = 10, .log_warmup = true}),
              "schedule.log_warmup");
}

}  // namespace
}  // namespace ferry::optim
