#include <gtest/gtest.h>

#include "planner/recording/hazards.h"

namespace ferry::planner {
namespace {

using swap::Lane;
using swap::Schedule;
using swap::Task;

// Orders tasks that are nothing but their lane and their uses.
class Recording {
public:
    explicit Recording(uint32_t resources) : hazards_(resources) {}
    Task add(Lane lane, std::vector<Use> uses) {
        Task task{.lane = lane};
        auto& tasks = schedule.lanes[static_cast<size_t>(lane)];
        task.index = static_cast<uint32_t>(tasks.size());
        hazards_.order(schedule, task, uses);
        tasks.push_back(static_cast<uint32_t>(schedule.tasks.size()));
        schedule.tasks.push_back(task);
        return task;
    }
    std::vector<std::pair<Lane, uint32_t>> waits(const Task& task) const {
        std::vector<std::pair<Lane, uint32_t>> result;
        for (uint32_t w = task.first_wait; w < task.first_wait + task.waits; ++w) {
            result.emplace_back(schedule.waits[w].lane, schedule.waits[w].index);
        }
        return result;
    }
    void finish() { hazards_.finish(schedule); }
    Schedule schedule;

private:
    Hazards hazards_;
};

using Waits = std::vector<std::pair<Lane, uint32_t>>;

TEST(Hazards, AReaderWaitsForTheWriter) {
    Recording r(1);
    r.add(Lane::h2d, {{0, Effect::write}});
    const Task reader = r.add(Lane::compute, {{0, Effect::read}});
    EXPECT_EQ(r.waits(reader), (Waits{{Lane::h2d, 0}}));
    EXPECT_EQ(reader.entries, 0u);
}

TEST(Hazards, AWriterWaitsForTheReaders) {
    Recording r(1);
    r.add(Lane::h2d, {{0, Effect::write}});
    r.add(Lane::compute, {{0, Effect::read}});
    r.add(Lane::d2h, {{0, Effect::read}});
    const Task writer = r.add(Lane::h2d, {{0, Effect::write}});
    EXPECT_EQ(r.waits(writer), (Waits{{Lane::compute, 0}, {Lane::d2h, 0}}));
}

TEST(Hazards, LanesThatRunInOrderNeedNoWaitsForThemselves) {
    Recording r(1);
    r.add(Lane::compute, {{0, Effect::write}});
    EXPECT_TRUE(r.waits(r.add(Lane::compute, {{0, Effect::read}})).empty());
    r.add(Lane::write, {{0, Effect::write}});
    EXPECT_EQ(r.waits(r.add(Lane::write, {{0, Effect::write}})), (Waits{{Lane::write, 0}}));
}

// One must not receive into what an earlier one still sends.
TEST(Hazards, ExchangesOverlapAndWaitForEachOther) {
    Recording r(2);
    r.add(Lane::comm, {{0, Effect::read}, {1, Effect::write}});
    EXPECT_EQ(r.waits(r.add(Lane::comm, {{0, Effect::write}})), (Waits{{Lane::comm, 0}}));
    EXPECT_EQ(r.waits(r.add(Lane::comm, {{1, Effect::read}})), (Waits{{Lane::comm, 0}}));
}

TEST(Hazards, JoiningWritersWaitForEarlierReadersButNotForEachOther) {
    Recording r(1);
    r.add(Lane::compute, {{0, Effect::write}});
    r.add(Lane::d2h, {{0, Effect::read}});
    const Task copy = r.add(Lane::h2d, {{0, Effect::join}});
    const Task check = r.add(Lane::check, {{0, Effect::join}});
    EXPECT_EQ(r.waits(copy), (Waits{{Lane::d2h, 0}}));
    EXPECT_EQ(r.waits(check), (Waits{{Lane::d2h, 0}}));
    const Task reader = r.add(Lane::compute, {{0, Effect::read}});
    EXPECT_EQ(r.waits(reader), (Waits{{Lane::h2d, 0}, {Lane::d2h, 0}, {Lane::check, 0}}));
}

TEST(Hazards, FirstUsesAreLeftToTheSchedulesBefore) {
    Recording r(3);
    EXPECT_EQ(r.add(Lane::compute, {{0, Effect::read}}).entries, 1u);
    EXPECT_EQ(r.add(Lane::compute, {{1, Effect::write}}).entries, 1u);
    EXPECT_EQ(r.add(Lane::h2d, {{2, Effect::join}}).entries, 1u);
    EXPECT_EQ(r.add(Lane::check, {{2, Effect::join}}).entries,
              1u);  // joins do not order each other
    EXPECT_EQ(r.add(Lane::h2d, {{0, Effect::write}}).entries,
              1u);  // after a read that ordered nothing
    EXPECT_FALSE(r.schedule.entries[0].writes);
    EXPECT_TRUE(r.schedule.entries[1].writes);
}

TEST(Hazards, WhatIsLeftBehindNamesLastWritersAndReaders) {
    Recording r(2);
    r.add(Lane::h2d, {{0, Effect::write}});
    r.add(Lane::compute, {{0, Effect::read}, {1, Effect::read}});
    r.finish();
    ASSERT_EQ(r.schedule.last_uses.size(), 2u);
    EXPECT_TRUE(r.schedule.last_uses[0].written);
    EXPECT_EQ(r.schedule.last_uses[0].writers.last[static_cast<size_t>(Lane::h2d)], 0);
    EXPECT_EQ(r.schedule.last_uses[0].readers.last[static_cast<size_t>(Lane::compute)], 0);
    EXPECT_FALSE(r.schedule.last_uses[1].written);
}

}  // namespace
}  // namespace ferry::planner
