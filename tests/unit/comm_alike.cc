// Ranks of several machines share out what they see: each machine's among those that see the same.
#include <gtest/gtest.h>

#include <vector>

#include "alike.h"
#include "tests/support/simulated_ranks.h"

namespace ferry::comm {
namespace {

// By rank, what each of them got.
std::vector<PartOfAlike> parts_of(const SimulatedRanks& ranks, const std::vector<uint64_t>& seen) {
    std::vector<PartOfAlike> parts(static_cast<size_t>(ranks.size));
    run_ranks(ranks, [&](Communicator& communicator, Executor& executor) {
        const auto rank = static_cast<size_t>(communicator.rank());
        parts[rank] = part_among_alike(communicator, executor, seen[rank], {.of = "things"});
    });
    return parts;
}

void expect_parts(const std::vector<PartOfAlike>& parts,
                  const std::vector<std::pair<int, int>>& are) {
    ASSERT_EQ(parts.size(), are.size());
    for (size_t rank = 0; rank < parts.size(); ++rank) {
        EXPECT_EQ(parts[rank].index, are[rank].first) << "rank " << rank;
        EXPECT_EQ(parts[rank].of, are[rank].second) << "rank " << rank;
    }
}

// The ranks are threads of one process here: the name of its host says nothing.
TEST(Alike, ShareWithinAMachineOnly) {
    expect_parts(parts_of({.size = 5, .hosts = 2}, {7, 7, 7, 7, 7}),
                 {{0, 3}, {0, 2}, {1, 3}, {1, 2}, {2, 3}});
}

TEST(Alike, DoNotShareWhatTheyWereGivenApart) {
    expect_parts(parts_of({.size = 4}, {7, 8, 7, 9}), {{0, 2}, {0, 1}, {1, 2}, {0, 1}});
}

TEST(Alike, GoByTheirPlacesAndThenByTheirRanks) {
    const std::vector<int> places{2, 0, 1, 0};
    std::vector<PartOfAlike> parts(4);
    run_ranks({.size = 4}, [&](Communicator& communicator, Executor& executor) {
        const auto rank = static_cast<size_t>(communicator.rank());
        parts[rank] = part_among_alike(communicator, executor, 7, {.of = "things"}, places[rank]);
    });
    expect_parts(parts, {{3, 4}, {0, 4}, {2, 4}, {1, 4}});
}

TEST(Alike, TakeAGpuEachOfThoseThatAllSee) {
    std::vector<int> gpus(4, -1);
    run_ranks({.size = 4, .hosts = 2}, [&](Communicator& communicator, Executor& executor) {
        gpus[static_cast<size_t>(communicator.rank())] = gpu_of_rank(communicator, executor);
    });
    EXPECT_EQ(gpus, (std::vector<int>{0, 0, 1, 1}));
}

TEST(RankPlace, IsAmongTheRanksOfTheMachine) {
    const std::vector<uint64_t> machines{5, 9, 5, 9, 9};
    const auto expect = [&](int rank, int local_rank, int local_size, int host) {
        const RankPlace place = place_among(machines, rank);
        EXPECT_EQ(place.rank, rank);
        EXPECT_EQ(place.size, 5);
        EXPECT_EQ(place.local_rank, local_rank) << rank;
        EXPECT_EQ(place.local_size, local_size) << rank;
        EXPECT_EQ(place.host, host) << rank;
    };
    expect(0, 0, 2, 0);
    expect(2, 1, 2, 0);
    expect(1, 0, 3, 1);
    expect(4, 2, 3, 1);
}

TEST(OwnGpus, AreDemandedOfAllRanks) {
    const GpuId a{1}, b{2}, c{1, 1};
    EXPECT_NO_THROW(require_own_gpus(std::vector{a, b, c}, "a GPU"));
    try {
        require_own_gpus(std::vector{a, b, c, b}, "a GPU");
        ADD_FAILURE();
    } catch (const Error& error) {
        EXPECT_EQ(error.trouble(), Trouble::usage);
        EXPECT_EQ(error.problem().what, "two ranks use the same GPU");
        EXPECT_EQ(error.problem().where, "GPU of ranks 1 and 3");
        EXPECT_EQ(error.problem().measured, "a GPU");
    }
}

}  // namespace
}  // namespace ferry::comm
