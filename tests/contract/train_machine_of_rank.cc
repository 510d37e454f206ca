// The part of its host that a rank takes.
#include <gtest/gtest.h>

#include "tests/support/simulated_ranks.h"
#include "train/setup/rank_share.h"

namespace ferry::train {
namespace {

// The part that each rank of a host with four cores takes; `bound`: the cores it was started on.
std::vector<Topology> machines_of(const std::vector<std::vector<int>>& bound, int hosts = 1) {
    std::vector<Topology> machines(bound.size());
    comm::run_ranks({.size = static_cast<int>(bound.size()), .hosts = hosts},
                    [&](comm::Communicator& ranks, Executor& executor) {
                        const auto rank = static_cast<size_t>(ranks.rank());
                        Topology host;
                        host.nodes = {{.os_index = 0, .cores = bound[rank], .memory_bytes = 800}};
                        host.host_cores = 4;
                        host.memory_limit_bytes = 800;
                        host.memory_left_bytes = 400;
                        host.cpu_quota = 3;
                        machines[rank] = machine_of_rank(std::move(host), "", &ranks, executor);
                    });
    return machines;
}
void expect_limits(const std::vector<Topology>& machines, int ranks_of_a_host) {
    for (const Topology& machine : machines) {
        EXPECT_EQ(machine.memory_limit_bytes, 800 / ranks_of_a_host);
        EXPECT_EQ(machine.memory_left_bytes, 400 / ranks_of_a_host);
        EXPECT_EQ(machine.cpu_quota, 3.0 / ranks_of_a_host);
    }
}
using Cores = std::vector<int>;

TEST(MachineOfRank, IsAPartOfTheCoresThatAllSee) {
    const auto machines = machines_of({{0, 1, 2, 3}, {0, 1, 2, 3}});
    EXPECT_EQ(machines[0].nodes[0].cores, (Cores{0, 1}));
    EXPECT_EQ(machines[1].nodes[0].cores, (Cores{2, 3}));
    expect_limits(machines, 2);
}

// The ranks' GPUs hang off the nodes the other way round.
TEST(MachineOfRank, HasItsCoresWhereItsGpuIs) {
    const std::vector<std::string> gpus{"c", "a", "b", "a"};
    std::vector<Cores> cores(gpus.size());
    comm::run_ranks({.size = static_cast<int>(gpus.size())}, [&](comm::Communicator& ranks,
                                                                 Executor& executor) {
        const auto rank = static_cast<size_t>(ranks.rank());
        Topology host;
        host.nodes = {{.os_index = 1, .cores = {0, 1}, .memory_bytes = 400},
                      {.os_index = 4, .cores = {2, 3}, .memory_bytes = 400}};
        host.host_cores = 4;
        host.attached = {{"a", true, 1}, {"b", true, 4}, {"c", true, 4}};
        const Topology mine = machine_of_rank(std::move(host), gpus[rank], &ranks, executor);
        for (const NumaNode& node : mine.nodes)
            cores[rank].insert(cores[rank].end(), node.cores.begin(), node.cores.end());
    });
    EXPECT_EQ(cores, (std::vector<Cores>{{2}, {0}, {3}, {1}}));
}

// mpirun binds ranks where it is not told otherwise; their memory is the host's all the same.
TEST(MachineOfRank, SharesMemoryAndQuotaWithRanksOnOtherCores) {
    const auto machines = machines_of({{0, 1}, {2, 3}});
    EXPECT_EQ(machines[0].nodes[0].cores, (Cores{0, 1}));
    EXPECT_EQ(machines[1].nodes[0].cores, (Cores{2, 3}));
    expect_limits(machines, 2);
}

TEST(MachineOfRank, SharesNothingWithAnotherHost) {
    const auto machines = machines_of({{0, 1, 2, 3}, {0, 1, 2, 3}}, 2);
    for (const Topology& machine : machines) EXPECT_EQ(machine.nodes[0].cores, (Cores{0, 1, 2, 3}));
    expect_limits(machines, 1);
}

TEST(MachineOfRank, WarnsWhereRanksWereBoundToLessThanTheirPart) {
    const auto warning = [](const std::vector<std::vector<int>>& bound) {
        testing::internal::CaptureStderr();
        machines_of(bound);
        return testing::internal::GetCapturedStderr();
    };
    EXPECT_NE(warning({{0}, {1}})
                  .find("bound it to 1 of this host's 4 cores, which 2 ranks could "
                        "share: start them with mpirun --bind-to none"),
              std::string::npos);
    EXPECT_NE(warning({{0, 1}, {0, 1}}).find("bound it and 1 more to 2 of"), std::string::npos);
    EXPECT_EQ(warning({{0, 1, 2, 3}, {0, 1, 2, 3}}), "");
    EXPECT_EQ(warning({{0, 1}, {2, 3}}), "");
    EXPECT_EQ(warning({{0}, {1}, {2}}), "");  // the quota has no more
}

}  // namespace
}  // namespace ferry::train
