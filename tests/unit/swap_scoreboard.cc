#include <gtest/gtest.h>

#include "scoreboard.h"

namespace ferry::swap {
namespace {

// A schedule of empty tasks: lane by lane, with the waits and entries given.
struct Draft {
    Schedule schedule{};
    Task& add(Lane lane, std::vector<Wait> waits = {}, std::vector<EntryUse> entries = {}) {
        auto& tasks = schedule.lanes[static_cast<size_t>(lane)];
        Task task{.lane = lane, .index = static_cast<uint32_t>(tasks.size())};
        task.first_wait = static_cast<uint32_t>(schedule.waits.size());
        task.waits = static_cast<uint32_t>(waits.size());
        schedule.waits.insert(schedule.waits.end(), waits.begin(), waits.end());
        task.first_entry = static_cast<uint32_t>(schedule.entries.size());
        task.entries = static_cast<uint32_t>(entries.size());
        schedule.entries.insert(schedule.entries.end(), entries.begin(), entries.end());
        tasks.push_back(static_cast<uint32_t>(schedule.tasks.size()));
        schedule.tasks.push_back(task);
        return schedule.tasks.back();
    }
    void leave(uint32_t resource, bool written, Lane writer, int64_t index) {
        LastUse use{.resource = resource, .written = written};
        (written ? use.writers : use.readers).raise(writer, index);
        schedule.last_uses.push_back(use);
    }
};

bool next_is_ready(Scoreboard& board, Lane lane) {
    const Active* active = nullptr;
    const Task* task = board.next(lane, &active);
    return task && board.ready(*task, *active);
}

TEST(Scoreboard, ATaskIsReadyOnceItsCountersAreReached) {
    Draft draft;
    draft.add(Lane::h2d);
    draft.add(Lane::h2d);
    draft.add(Lane::compute, {{Lane::h2d, 1}});
    Scoreboard board(0);
    board.append(draft.schedule, 1);
    EXPECT_FALSE(next_is_ready(board, Lane::compute));
    board.take(Lane::h2d);
    board.take(Lane::h2d);
    board.complete(Lane::h2d, 1);
    EXPECT_FALSE(next_is_ready(board, Lane::compute));
    board.complete(Lane::h2d, 2);
    EXPECT_TRUE(next_is_ready(board, Lane::compute));
}

// Of the schedules before as well; what comes behind it in program order does not count.
TEST(Scoreboard, KnowsWhatIsLeftBeforeATask) {
    Draft draft;
    draft.add(Lane::comm).item = 1;
    draft.add(Lane::compute);
    draft.add(Lane::comm).item = 2;
    draft.add(Lane::compute);
    draft.add(Lane::comm).item = 3;
    Scoreboard board(0);
    board.append(draft.schedule, 1);
    board.append(draft.schedule, 2);
    const auto is_left = [&](int32_t item) {
        const Active *active = nullptr, *unused = nullptr;
        const Task* task = board.next(Lane::compute, &active);
        board.next(Lane::comm, &unused);
        return board.is_left_before(Lane::comm, *task, *active,
                                    [&](const Task& other) { return other.item == item; });
    };
    EXPECT_TRUE(is_left(1));
    EXPECT_FALSE(is_left(2));
    board.take(Lane::comm);
    EXPECT_FALSE(is_left(1));
    board.take(Lane::compute);
    EXPECT_TRUE(is_left(2));
    EXPECT_FALSE(is_left(3));
    board.take(Lane::compute);  // then come those of the next schedule
    EXPECT_TRUE(is_left(3));
    EXPECT_TRUE(is_left(1));
    board.take(Lane::comm);
    board.take(Lane::comm);
    EXPECT_FALSE(is_left(3));
    EXPECT_TRUE(is_left(1));
    board.take(Lane::comm);
    EXPECT_FALSE(is_left(1));
}

TEST(Scoreboard, CountsGoOnOverSchedules) {
    Draft draft;
    draft.add(Lane::h2d);
    draft.add(Lane::compute, {{Lane::h2d, 0}});
    Scoreboard board(0);
    board.append(draft.schedule, 1);
    board.append(draft.schedule, 2);
    for (const Lane lane : {Lane::h2d, Lane::compute}) board.take(lane), board.complete(lane, 1);
    EXPECT_FALSE(next_is_ready(board, Lane::compute));  // the second one's own copy is not done
    board.take(Lane::h2d);
    board.complete(Lane::h2d, 2);
    EXPECT_TRUE(next_is_ready(board, Lane::compute));
    EXPECT_FALSE(board.all_complete());
    board.take(Lane::compute);
    EXPECT_FALSE(board.none_in_flight());
    board.complete(Lane::compute, 2);
    EXPECT_TRUE(board.all_complete());
}

TEST(Scoreboard, AnEntryWaitsForWhatEarlierSchedulesLeft) {
    Draft writer, reader, writer_again;
    writer.add(Lane::write);
    writer.leave(0, true, Lane::write, 0);
    reader.add(Lane::read, {}, {{0, false}});
    reader.leave(0, false, Lane::read, 0);
    writer_again.add(Lane::team, {}, {{0, true}});
    Scoreboard board(1);
    board.append(writer.schedule, 1);
    board.append(reader.schedule, 2);
    board.append(writer_again.schedule, 3);
    EXPECT_FALSE(next_is_ready(board, Lane::read));
    board.take(Lane::write);
    board.complete(Lane::write, 1);
    EXPECT_TRUE(next_is_ready(board, Lane::read));
    EXPECT_FALSE(next_is_ready(board, Lane::team));  // the reader comes first
    board.take(Lane::read);
    board.complete(Lane::read, 1);
    EXPECT_TRUE(next_is_ready(board, Lane::team));
}

TEST(ScoreboardDeath, AFifthUnfinishedScheduleIsABug) {
    Draft draft;
    draft.add(Lane::compute);
    Scoreboard board(0);
    for (int i = 0; i < 4; ++i) board.append(draft.schedule, i);
    EXPECT_DEATH(board.append(draft.schedule, 4), "too many schedules");
}

TEST(ProveAcyclicDeath, AWaitForALaterTaskIsABug) {
    Draft draft;
    draft.add(Lane::compute, {{Lane::h2d, 0}});
    draft.add(Lane::h2d);
    EXPECT_DEATH(prove_acyclic(draft.schedule), "bug");
}

}  // namespace
}  // namespace ferry::swap
