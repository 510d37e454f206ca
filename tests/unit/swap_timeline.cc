#include <gtest/gtest.h>

#include "swap/schedule.h"

namespace ferry::swap {
namespace {

// A schedule written by hand: every task is its lane, its seconds and the tasks it waits for.
class Steps {
public:
    size_t add(Lane lane, double seconds, std::vector<size_t> after = {},
               std::array<double, kShared> part = {}) {
        Task task{.lane = lane};
        auto& lane_tasks = schedule.lanes[static_cast<size_t>(lane)];
        task.index = static_cast<uint32_t>(lane_tasks.size());
        task.item = static_cast<int32_t>(costs_.size());
        task.first_wait = static_cast<uint32_t>(schedule.waits.size());
        task.waits = static_cast<uint32_t>(after.size());
        for (const size_t other : after)
            schedule.waits.push_back({schedule.tasks[other].lane, schedule.tasks[other].index});
        lane_tasks.push_back(static_cast<uint32_t>(schedule.tasks.size()));
        schedule.tasks.push_back(task);
        costs_.push_back({seconds, part});
        return schedule.tasks.size() - 1;
    }
    // The resource is read by `reader` before any later step may let `writer` write it.
    void enter(size_t task, uint32_t resource, bool writes) {
        schedule.tasks[task].first_entry = static_cast<uint32_t>(schedule.entries.size());
        schedule.tasks[task].entries = 1;
        schedule.entries.push_back({resource, writes});
    }
    void leave(uint32_t resource, size_t writer) {
        LastUse last{.resource = resource, .written = true, .writers = {}, .readers = {}};
        last.writers.raise(schedule.tasks[writer].lane, schedule.tasks[writer].index);
        schedule.last_uses.push_back(last);
    }
    Timeline predict(size_t outcome, uint32_t resources = 0) {
        const RankSteps alone = of_rank(outcome, resources);
        return swap::predict(*alone.first, *alone.steady, resources, alone.cost);
    }
    RankSteps of_rank(size_t outcome, uint32_t resources = 0) {
        schedule.outcome = {schedule.tasks[outcome].lane, schedule.tasks[outcome].index};
        schedule.has_outcome = true;
        return {&schedule, &schedule, resources,
                [this](const Task& task) { return costs_[static_cast<size_t>(task.item)]; }};
    }
    Schedule schedule;

private:
    std::vector<Cost> costs_;
};

TEST(Timeline, ALaneIsInOrderAndWaitsAreKept) {
    Steps steps;
    const size_t copy = steps.add(Lane::h2d, 2);
    const size_t first = steps.add(Lane::compute, 3, {copy});
    const size_t second = steps.add(Lane::compute, 1);
    const Timeline timeline = steps.predict(second);
    EXPECT_DOUBLE_EQ(timeline.step_seconds, 6);
    EXPECT_DOUBLE_EQ(timeline.tasks[first].begin_s, 2);
    EXPECT_DOUBLE_EQ(timeline.tasks[second].begin_s, 5);
    EXPECT_DOUBLE_EQ(timeline.tasks[second].end_s, 6);
    EXPECT_DOUBLE_EQ(timeline.busy_seconds[static_cast<size_t>(Lane::compute)], 4);
}

TEST(Timeline, LanesOverlap) {
    Steps steps;
    steps.add(Lane::h2d, 4);
    const size_t work = steps.add(Lane::compute, 5);
    EXPECT_DOUBLE_EQ(steps.predict(work).step_seconds, 5);
}

TEST(Timeline, WhatIsSharedSlowsAlike) {
    Steps steps;
    // Half of the cores and all of them: together one and a half times what there is.
    const size_t half = steps.add(Lane::team, 2, {}, {0.5, 0, 0});
    const size_t all = steps.add(Lane::compute, 4, {}, {1, 0, 0});
    const Timeline timeline = steps.predict(all);
    EXPECT_DOUBLE_EQ(timeline.tasks[half].end_s, 3);
    EXPECT_DOUBLE_EQ(timeline.tasks[all].end_s, 5);  // 2 of 4 done in the first 3 seconds
}

// A drive that two share gives each half its rate, and so each takes half of the cores that it
// would take alone: 0.25 twice, and what computes has 1 / 1.5 of its speed. All slow down alike.
TEST(Timeline, WhoWaitsForTheDiskTakesLessOfTheRest) {
    Steps steps;
    const size_t read = steps.add(Lane::read, 4, {}, {0.5, 1, 0});
    const size_t write = steps.add(Lane::write, 4, {}, {0.5, 1, 0});
    const size_t kernel = steps.add(Lane::compute, 4, {}, {1, 0, 0});
    const Timeline timeline = steps.predict(steps.add(Lane::check, 0, {read, write, kernel}));
    EXPECT_DOUBLE_EQ(timeline.tasks[kernel].end_s, 6);
    // 6 s at a third of their speed leave 2 s of each: with the cores to themselves, at half.
    EXPECT_DOUBLE_EQ(timeline.tasks[read].end_s, 10);
    EXPECT_DOUBLE_EQ(timeline.tasks[write].end_s, 10);
}

TEST(Timeline, WorkLeftBehindMeetsTheNextStep) {
    // The optimizer's work after the outcome: the next forward waits for it.
    Steps steps;
    const size_t forward = steps.add(Lane::compute, 3);
    const size_t update = steps.add(Lane::team, 5, {forward});
    steps.enter(forward, 0, false);
    steps.leave(0, update);
    const Timeline timeline = steps.predict(forward, 1);
    EXPECT_DOUBLE_EQ(timeline.step_seconds, 8);
    EXPECT_DOUBLE_EQ(timeline.tasks[forward].begin_s, 5);  // after the last step's update
}

TEST(Timeline, ALaneWithMoreWorkThanTheStepSetsItsTime) {
    Steps steps;
    const size_t outcome = steps.add(Lane::compute, 1);
    const size_t write = steps.add(Lane::write, 4, {outcome});
    steps.enter(outcome, 0, true);
    steps.leave(0, write);
    EXPECT_DOUBLE_EQ(steps.predict(outcome, 1).step_seconds, 5);
}

// ---------------------------------------------------------------- several ranks

// Where each task of each rank meets others.
using Points = std::vector<std::vector<int>>;
std::vector<Timeline> together(const std::vector<RankSteps>& ranks,
                               const std::vector<std::vector<size_t>>& points, const Points& at) {
    return predict_together(ranks, points, [&at](size_t rank, const Task& task) {
        return at[rank][static_cast<size_t>(task.item)];
    });
}

TEST(RanksTogether, WaitForEachOtherWhereTheyMeet) {
    Steps first, second;
    const size_t work = first.add(Lane::compute, 3);
    const size_t gives = first.add(Lane::comm, 1, {work});
    const size_t agrees = first.add(Lane::comm, 0, {gives});
    const size_t takes = second.add(Lane::comm, 1);
    const size_t goes_on = second.add(Lane::compute, 5, {takes});
    const size_t agrees_too = second.add(Lane::comm, 0, {goes_on});
    const auto found = together({first.of_rank(agrees), second.of_rank(agrees_too)},
                                {{0, 1}, {0, 1}}, {{kAlone, 0, 1}, {0, kAlone, 1}});
    for (const Timeline& timeline : found) EXPECT_DOUBLE_EQ(timeline.step_seconds, 9);
    EXPECT_DOUBLE_EQ(found[0].tasks[gives].begin_s, 3);
    EXPECT_DOUBLE_EQ(found[1].tasks[takes].begin_s, 3);  // not when it was asked for
    EXPECT_DOUBLE_EQ(found[1].tasks[goes_on].begin_s, 4);
    EXPECT_DOUBLE_EQ(found[1].busy_seconds[static_cast<size_t>(Lane::comm)], 1);
}

// What waits for one rank holds up nothing between two others, but the lane ends in its order.
TEST(RanksTogether, MeetAtOnePointWhileTheyWaitAtAnother) {
    Steps late, between, early;
    const size_t work = late.add(Lane::compute, 10);
    const size_t gives = late.add(Lane::comm, 1, {work});
    const size_t takes = between.add(Lane::comm, 1);
    const size_t passes = between.add(Lane::comm, 2);
    const size_t after = between.add(Lane::compute, 1, {passes});
    const size_t gets = early.add(Lane::comm, 2);
    const std::array<size_t, 3> agree{late.add(Lane::comm, 0, {gives}),
                                      between.add(Lane::comm, 0, {after}),
                                      early.add(Lane::comm, 0, {gets})};
    const auto found =
        together({late.of_rank(agree[0]), between.of_rank(agree[1]), early.of_rank(agree[2])},
                 {{0, 1}, {1, 2}, {0, 1, 2}}, {{kAlone, 0, 2}, {0, 1, kAlone, 2}, {1, 2}});
    EXPECT_DOUBLE_EQ(found[2].tasks[gets].end_s, 2);
    EXPECT_DOUBLE_EQ(found[1].tasks[passes].end_s, 2);
    EXPECT_DOUBLE_EQ(found[1].tasks[takes].end_s, 11);
    EXPECT_DOUBLE_EQ(found[1].tasks[after].begin_s, 11);
    for (const Timeline& timeline : found) EXPECT_DOUBLE_EQ(timeline.step_seconds, 12);
}

// Two exchanges at one point go one after the other, as often as both ranks come there.
TEST(RanksTogether, MeetInTheirOrder) {
    Steps one, other;
    const size_t a = one.add(Lane::comm, 2), b = one.add(Lane::comm, 3);
    const size_t work = other.add(Lane::compute, 4);
    const size_t c = other.add(Lane::comm, 2), d = other.add(Lane::comm, 3, {work});
    const size_t ends = one.add(Lane::comm, 0, {b}), ends_too = other.add(Lane::comm, 0, {d});
    const auto found = together({one.of_rank(ends), other.of_rank(ends_too)}, {{0, 1}, {0, 1}},
                                {{0, 0, 1}, {kAlone, 0, 0, 1}});
    EXPECT_DOUBLE_EQ(found[0].tasks[a].end_s, 2);
    EXPECT_DOUBLE_EQ(found[1].tasks[c].end_s, 2);
    EXPECT_DOUBLE_EQ(found[0].tasks[b].begin_s, 4);
    EXPECT_DOUBLE_EQ(found[1].tasks[d].end_s, 7);
}

TEST(RanksTogether, OfOneAreThatOne) {
    Steps steps;
    const size_t work = steps.add(Lane::compute, 2);
    const size_t gathers = steps.add(Lane::comm, 3, {work});
    steps.add(Lane::comm, 1);
    const size_t ends = steps.add(Lane::compute, 1, {gathers});
    const Timeline alone = steps.predict(ends);
    const auto found = together({steps.of_rank(ends)}, {}, {{kAlone, kAlone, kAlone, kAlone}});
    EXPECT_EQ(found.front().step_seconds, alone.step_seconds);
    EXPECT_EQ(found.front().busy_seconds, alone.busy_seconds);
}

}  // namespace
}  // namespace ferry::swap
