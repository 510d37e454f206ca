// Members that measure at the same time: what each of them gets to know, and that none waits for
// one that has failed.
#include <gtest/gtest.h>

#include <atomic>
#include <exception>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "base/log.h"
#include "ferry/error.h"
#include "tests/support/simulated_ranks.h"
#include "train/measuring/together.h"

namespace ferry::train {
namespace {

using cost::KernelTimes;
using cost::Measurements;

// What each of so many threads threw; empty: nothing.
using Member = std::function<void(int index, Together& end)>;
void on_threads(int size, const Member& body) { ThreadsTogether(size).each(body); }
void on_ranks(int size, const Member& body) {
    comm::run_ranks({.size = size, .threads = true},
                    [&](comm::Communicator& ranks, Executor& executor) {
                        RanksTogether end(ranks, executor);
                        body(ranks.rank(), end);
                    });
}

class Members : public testing::TestWithParam<std::pair<const char*, decltype(&on_threads)>> {
protected:
    void on(int size, const Member& body) const { GetParam().second(size, body); }

    // All three members end with this error of one of them.
    template <class Body>
    void expect_all_end(const std::string& what, const Body& body) const {
        std::atomic<int> ended = 0;
        const auto all = [&] {
            on(3, [&](int index, Together& end) {
                try {
                    body(index, end);
                } catch (...) {
                    ++ended;
                    throw;
                }
            });
        };
        try {
            all();
            ADD_FAILURE() << "nothing was thrown";
        } catch (const Error& error) {
            EXPECT_EQ(error.problem().what, what);
        }
        EXPECT_EQ(ended, 3);
    }
};
INSTANTIATE_TEST_SUITE_P(Measure, Members,
                         testing::Values(std::pair{"Threads", &on_threads},
                                         std::pair{"Ranks", &on_ranks}),
                         [](const auto& kind) { return kind.param.first; });

TEST_P(Members, BeginAtOnceAndGoOnUntilAllHaveEnded) {
    constexpr int kSize = 3;
    std::atomic<int> came = 0, ended = 0;
    std::vector<std::atomic<int>> loads(kSize);
    on(kSize, [&](int index, Together& end) {
        EXPECT_EQ(end.size(), kSize);
        const auto mine = static_cast<size_t>(index);
        for (int round = 1; round <= 3; ++round) {
            ++came;
            end.run(
                [&] {
                    EXPECT_GE(came.load(), kSize * round);
                    // The last one ends once the others have nothing left but their loads.
                    while (index == 0 && (loads[1] < round || loads[2] < round)) {
                    }
                    ++ended;
                },
                [&] { ++loads[mine]; });
            EXPECT_GE(ended.load(), kSize * round);
        }
    });
    EXPECT_GE(loads[1].load(), 3);
}

TEST_P(Members, HaveNoWorkAndNoLoadWhereTheyNeedNone) {
    on(3, [&](int index, Together& end) {
        int worked = 0;
        end.run(index == 1 ? Together::Work([&] { ++worked; }) : Together::Work(), {});
        EXPECT_EQ(worked, index == 1 ? 1 : 0);
    });
}

// More numbers than one exchange of ranks carries.
TEST_P(Members, GetTheNumbersOfAllHoweverManyEachHas) {
    constexpr int64_t kMany = 20000;
    on(3, [&](int index, Together& end) {
        const std::vector<double> mine(static_cast<size_t>(index * kMany), 1.0 + index);
        const auto all = end.all(mine);
        ASSERT_EQ(all.size(), 3U);
        for (int other = 0; other < 3; ++other)
            EXPECT_EQ(all[static_cast<size_t>(other)],
                      std::vector<double>(static_cast<size_t>(other * kMany), 1.0 + other));
        EXPECT_EQ(end.least(index + 5.0), 5);
        EXPECT_EQ(end.most(index + 5.0), 7);
    });
}

TEST_P(Members, EndWhereOneOfThemFails) {
    for (const int failing : {0, 2}) {
        SCOPED_TRACE(failing);
        expect_all_end("this one fails", [&](int index, Together& end) {
            const auto end_of_others = [&] {
                if (index == failing)
                    throw Error(Trouble::io, {.what = "this one fails", .where = "here"});
            };
            end.run(end_of_others, [] {});
        });
    }
}

// Its own work has ended well, and the others' ends well too: they hear of it where they meet next.
TEST_P(Members, EndWhereTheLoadOfOneOfThemFails) {
    for (const int failing : {0, 2}) {
        SCOPED_TRACE(failing);
        std::atomic<bool> failed = false;
        expect_all_end("this load fails", [&](int index, Together& end) {
            const auto work = [&] {
                while (index != failing && !failed) {
                }
            };
            const auto load = [&] {
                if (index != failing) return;
                failed = true;
                throw Error(Trouble::io, {.what = "this load fails", .where = "here"});
            };
            end.run(work, load);
            end.most(index);
        });
    }
}

TEST_P(Members, GoByTheSlowestOfThem) {
    const KernelTimes::Kind both{1, 1, 0}, mine{2, 1, 7}, theirs{3, 2, int64_t{1} << 50};
    on(2, [&](int index, Together& end) {
        const bool first = index == 0;
        Measurements found{.copy_bytes_per_s = first ? 8e9 : 9e9,
                           .dram_bytes_per_s = first ? 2e10 : 1e10,
                           .update_overhead_s = first ? 1e-5 : 3e-5,
                           .out_of_place = first ? 1.5 : 1.0,
                           .momentum_bytes_per_s = 0,
                           .product_flops_per_s = first ? 1e11 : 2e11};
        found.kernels.seconds = {{both, first ? 0.25 : 0.5}, {first ? mine : theirs, 0.125}};
        found.kernels.saved_s = {first ? 0.5 : 0.25, 0, 1};
        agree_on_slowest(end, found);
        EXPECT_EQ(found.copy_bytes_per_s, 8e9);
        EXPECT_EQ(found.dram_bytes_per_s, 1e10);
        EXPECT_EQ(found.update_overhead_s, 3e-5);
        EXPECT_EQ(found.out_of_place, 1.5);
        EXPECT_EQ(found.momentum_bytes_per_s, 0);
        EXPECT_EQ(found.product_flops_per_s, 1e11);
        // Kernels of another stage are none of this one's.
        EXPECT_EQ(found.kernels.seconds, (std::map<KernelTimes::Kind, double>{
                                             {both, 0.5}, {first ? mine : theirs, 0.125}}));
        EXPECT_EQ(found.kernels.saved_s, (model::OfSaved<double>{0.5, 0, 1}));
    });
}

TEST(OneAlone, GoesByWhatItFinds) {
    int worked = 0;
    alone().run([&] { ++worked; }, [&] { worked += 100; });
    EXPECT_EQ(worked, 1);
    EXPECT_EQ(alone().all(std::vector<double>{1, 2}), (std::vector<std::vector<double>>{{1, 2}}));
    Measurements found{.dram_bytes_per_s = 3};
    agree_on_slowest(alone(), found);
    EXPECT_EQ(found.dram_bytes_per_s, 3);
}

// As the ranks of a run do.
TEST(ThreadsOfOneProcess, SayOnceWhatAllWouldSay) {
    testing::internal::CaptureStderr();
    ThreadsTogether(3).each([](int, Together&) { log_warn_of_run("all of them would say so"); });
    const std::string said = testing::internal::GetCapturedStderr();
    const size_t first = said.find("all of them would say so");
    ASSERT_NE(first, std::string::npos) << said;
    EXPECT_EQ(said.find("all of them would say so", first + 1), std::string::npos) << said;
}

}  // namespace
}  // namespace ferry::train
