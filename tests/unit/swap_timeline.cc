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
        schedule.outcome = {schedule.tasks[outcome].lane, schedule.tasks[outcome].index};
        schedule.has_outcome = true;
        return swap::predict(schedule, schedule, resources, [this](const Task& task) {
            return costs_[static_cast<size_t>(task.item)];
        });
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

}  // namespace
}  // namespace ferry::swap
