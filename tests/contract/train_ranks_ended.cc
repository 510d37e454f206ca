// Ranks that do not belong together, and ranks that end before the others.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <chrono>
#include <fstream>
#include <functional>
#include <stdexcept>
#include <thread>

#include "tests/contract/train_ranks_fixture.h"
#include "tests/support/simulated_ranks.h"
#include "train/rank_agreement.h"

namespace ferry::train::of_ranks {
namespace {

TEST_F(Ranks, NameTheOneThatWasStartedOtherwiseAndTheKey) {
    const auto differing = [&](const std::function<void(Config&)>& change) {
        const auto found = problems(3, [&](int rank) {
            Config mine = config();
            if (rank == 2) change(mine);
            return mine;
        });
        for (const Problem& problem : found) EXPECT_EQ(problem.where, found[0].where);
        return found[0].where;
    };
    EXPECT_EQ(differing([](Config& c) { c.optimizer.lr = 0.5; }), "optimizer.lr on rank 2");
    EXPECT_EQ(differing([](Config& c) { c.zero.stage = 1; }), "zero.stage on rank 2");
    EXPECT_EQ(differing([](Config& c) { c.budgets.host_bytes = kGiB; }), "budgets.host on rank 2");
    EXPECT_EQ(differing([](Config& c) { c.optimizer.beta2 = 0.5; }), "optimizer.betas on rank 2");
}

// Nothing that a user can set differently is left by then; a bug that lets plans differ would hang.
TEST(PlansOfRanks, AreRefusedWhereTheyExchangeInAnotherOrder) {
    const auto said = comm::outcomes_of(
        {.size = 3, .threads = true}, [](comm::Communicator& ranks, Executor& executor) {
            swap::Schedule step;
            for (const int64_t bytes : {int64_t{8}, int64_t{ranks.rank() == 1 ? 24 : 16}}) {
                step.lanes[static_cast<size_t>(swap::Lane::comm)].push_back(
                    static_cast<uint32_t>(step.tasks.size()));
                step.tasks.push_back({.lane = swap::Lane::comm, .bytes = bytes});
            }
            const swap::Schedule* const all[] = {&step};
            require_same_exchanges(ranks, executor, all, false, ranks.size());
        });
    for (const std::exception_ptr& error : said) {
        ASSERT_TRUE(error);
        try {
            std::rethrow_exception(error);
        } catch (const Error& why) {
            EXPECT_EQ(why.trouble(), Trouble::usage);
            EXPECT_EQ(why.problem().where, "the plan: the order of the exchanges on rank 1");
        }
    }
}

// Two stages that both take over before they pass on; or one of them does.
TEST(PlansOfRanks, AreRefusedWhereStagesWaitForEachOther) {
    for (const bool both : {true, false}) {
        const auto said = comm::outcomes_of(
            {.size = 2, .threads = true}, [&](comm::Communicator& ranks, Executor& executor) {
                const int stage = ranks.rank();
                swap::Schedule step{.name = "a step"};
                const auto add = [&](cost::Op op, int32_t layer) {
                    step.lanes[static_cast<size_t>(swap::Lane::comm)].push_back(
                        static_cast<uint32_t>(step.tasks.size()));
                    const auto link =
                        stage == 0 ? cost::StageLink::next : cost::StageLink::previous;
                    step.tasks.push_back({.lane = swap::Lane::comm,
                                          .op = static_cast<uint8_t>(op),
                                          .flags = static_cast<uint8_t>(link),
                                          .layer = layer,
                                          .item = 0,
                                          .bytes = 8});
                };
                const int32_t taken = stage == 0 ? 2 : 1, passed = 3 - taken;
                const bool takes_first = both || stage == 1;
                if (takes_first) add(cost::Op::take_over, taken);
                add(cost::Op::pass_on, passed);
                if (!takes_first) add(cost::Op::take_over, taken);
                const swap::Schedule* const all[] = {&step};
                require_stages_end(ranks, executor, all, stage, 2);
            });
        for (const std::exception_ptr& error : said) {
            ASSERT_EQ(error != nullptr, both);
            if (!both) continue;
            try {
                std::rethrow_exception(error);
            } catch (const Error& why) {
                EXPECT_EQ(why.trouble(), Trouble::internal);
                EXPECT_EQ(why.problem().where, "the schedule \"a step\"");
                EXPECT_THAT(why.problem().measured,
                            testing::HasSubstr("stage 0 takes over layer 2, item 0, from stage 1"));
            }
        }
    }
}

// As another number of ranks is refused, where the errors of momentum's codes are of so many: each
// rank finds it by itself, and one long after the others. Had they ended, it would hear of lost
// ranks instead.
TEST(RanksThatRefuseAlike, SayTheSameHoweverLateOneIs) {
    constexpr int kRanks = 3;
    for (int late = 0; late < kRanks; ++late) {
        std::atomic<int> refused = 0, gone = 0;
        const auto said = comm::outcomes_of(
            {.size = kRanks, .threads = true}, [&](comm::Communicator& ranks, Executor& executor) {
                const bool waits = ranks.rank() == late;
                const auto find = [&]() -> int {
                    while (waits && refused < kRanks - 1) std::this_thread::yield();
                    // Time to end, for those that do not wait for this one.
                    if (waits) std::this_thread::sleep_for(std::chrono::milliseconds(50));
                    EXPECT_EQ(gone, 0);
                    ranks.check();  // throws rank_lost where one has ended
                    ++refused;
                    throw Error(Trouble::usage, {.what = "another number of ranks"});
                };
                try {
                    find_alike(&ranks, executor, find);
                } catch (const Error&) {
                    ++gone;
                    throw;
                }
            });
        ASSERT_EQ(std::ssize(said), kRanks);
        for (const std::exception_ptr& error : said) {
            ASSERT_TRUE(error);
            try {
                std::rethrow_exception(error);
            } catch (const Error& why) {
                EXPECT_EQ(why.problem().what, "another number of ranks") << "late: " << late;
                EXPECT_EQ(why.exit_code(), 2);
            }
        }
    }
}

TEST_F(Ranks, RefuseAStepThatTheyCannotShare) {
    Config odd = config();
    odd.batch.micro_batches = 5;
    for (const Problem& problem : problems(3, [&](int) { return odd; })) {
        EXPECT_EQ(problem.where, "batch.micro_batches");
        EXPECT_EQ(problem.measured, "5 micro-batches, 3 ranks");
    }
    odd.batch.micro_batches = 6;
    odd.swap.groups = 3;
    for (const Problem& problem : problems(3, [&](int) { return odd; }))
        EXPECT_EQ(problem.where, "swap.groups");
}

// By an error of the engine's caller, who says so or does not.
TEST_F(Ranks, LearnAtOnceThatOneEndsAndWhy) {
    for (const bool says : {true, false}) {
        const auto found = problems(
            3, [&](int) { return config(); },
            [&](int rank, Engine& engine) {
                engine.step();
                if (rank == 1 && says) engine.abandon("its disk is full");
                if (rank == 1) throw std::runtime_error("its disk is full");
                for (int step = 0; step < 100; ++step) engine.step();
            });
        EXPECT_EQ(found[1].what, "its disk is full");
        for (const size_t rank : {size_t{0}, size_t{2}})
            EXPECT_EQ(found[rank].what,
                      std::string("lost rank 1: it ended with an error: ") +
                          (says ? "its disk is full" : "raised between its steps"));
    }
}

TEST_F(Ranks, LearnAtOnceThatOneCannotStart) {
    Config mine = config();
    mine.budgets.nvme = {{.path = directory_.path()}};
    std::ofstream(directory_ / "rank-1") << "where its directory would be";
    const auto start = std::chrono::steady_clock::now();
    const auto found = problems(3, [&](int) { return mine; });
    EXPECT_EQ(found[1].what, "a rank cannot make its directory");
    EXPECT_EQ(found[1].measured, "a file is in its place");
    EXPECT_EQ(found[1].remedy, "move that file away");
    for (const size_t rank : {size_t{0}, size_t{2}})
        EXPECT_EQ(found[rank].what.substr(0, 12), "lost rank 1:") << found[rank].what;
    const double seconds = comm::CommOptions{}.timeout_seconds / 4;
    EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::duration<double>(seconds));
}

TEST_F(Ranks, StopTogetherWhenOneIsAskedTo) {
    std::array<int, 3> stopped_at{};
    const auto found = problems(
        3, [&](int) { return config(); },
        [&](int rank, Engine& engine) {
            int& step = stopped_at[static_cast<size_t>(rank)];
            while (!engine.any(rank == 2 && step == 2)) engine.step(), ++step;
        });
    for (const Problem& problem : found) EXPECT_EQ(problem.what, "");
    EXPECT_EQ(stopped_at, (std::array<int, 3>{2, 2, 2}));
}

}  // namespace
}  // namespace ferry::train::of_ranks
