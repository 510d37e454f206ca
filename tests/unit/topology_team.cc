#include <gtest/gtest.h>
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <mutex>
#include <set>
#include <stdexcept>
#include <thread>

#include "ferry/error.h"
#include "ferry/team.h"
#include "topology/topology.h"

namespace ferry {
namespace {

TEST(Team, calls_every_index_once) {
    for (const int threads : {1, 2, 5}) {
        Team team(threads);
        EXPECT_EQ(team.threads(), threads);
        for (const int64_t count : {0, 1, 2, 7, 1000}) {
            std::vector<std::atomic<int>> calls(static_cast<size_t>(count));
            team.parallel(count, [&](int64_t i) { ++calls[static_cast<size_t>(i)]; });
            EXPECT_TRUE(
                std::all_of(calls.begin(), calls.end(), [](const auto& n) { return n == 1; }));
        }
    }
}

TEST(Team, of_one_works_on_the_calling_thread_in_order) {
    Team team(1);
    std::vector<int64_t> order;
    team.parallel(5, [&](int64_t i) { order.push_back(i); });
    EXPECT_EQ(order, (std::vector<int64_t>{0, 1, 2, 3, 4}));
}

// Two loops from two threads share the team: no more bodies at once than it has threads.
TEST(Team, never_oversubscribes) {
    Team team(2);
    std::atomic<int> inside{0}, most{0};
    const auto body = [&](int64_t) {
        const int now = ++inside;
        int seen = most;
        while (seen < now && !most.compare_exchange_weak(seen, now)) {
        }
        std::this_thread::sleep_for(std::chrono::microseconds(200));
        --inside;
    };
    std::thread other([&] { team.parallel(100, body); });
    team.parallel(100, body);
    other.join();
    EXPECT_LE(most, 2);
}

TEST(Team, may_be_used_from_within) {
    Team team(2);
    std::atomic<int> calls{0};
    team.parallel(8, [&](int64_t) { team.parallel(8, [&](int64_t) { ++calls; }); });
    EXPECT_EQ(calls, 64);
}

TEST(Team, hands_an_exception_to_its_caller) {
    for (const int threads : {1, 3}) {
        Team team(threads);
        EXPECT_THROW(team.parallel(10,
                                   [](int64_t i) {
                                       if (i == 3) throw std::runtime_error("3");
                                   }),
                     std::runtime_error);
    }
}

TEST(Team, with_cores_works_there_and_gives_the_thread_back_as_it_was) {
    cpu_set_t before, after;
    ASSERT_EQ(sched_getaffinity(0, sizeof(before), &before), 0);
    int core = 0;
    while (!CPU_ISSET(static_cast<size_t>(core), &before)) ++core;
    for (const int threads : {1, 2}) {
        Team team(threads, std::vector<int>{core});
        std::mutex lock;
        std::set<int> seen;
        team.parallel(50, [&](int64_t) {
            std::lock_guard hold(lock);
            seen.insert(sched_getcpu());
        });
        EXPECT_EQ(seen, std::set<int>{core});
    }
    ASSERT_EQ(sched_getaffinity(0, sizeof(after), &after), 0);
    EXPECT_TRUE(CPU_EQUAL(&before, &after));
}

TEST(Team, survives_cores_that_do_not_exist) {
    Team team(2, std::vector<int>{1000});
    std::atomic<int> calls{0};
    team.parallel(10, [&](int64_t) { ++calls; });
    EXPECT_EQ(calls, 10);
}

TEST(NodeTeams, of_one_node_is_one_team) {
    const Topology machine{.nodes = {{.os_index = 0, .cores = {0, 1}}}};
    NodeTeams teams(machine, 2);
    ASSERT_EQ(teams.count(), 1);
    EXPECT_EQ(teams.team(0).threads(), 2);
    EXPECT_EQ(&teams.all(), &teams.team(0));
    int calls = 0;
    teams.each([&](int index, Team& team) {
        EXPECT_EQ(index, 0);
        EXPECT_EQ(&team, &teams.team(0));
        ++calls;
    });
    EXPECT_EQ(calls, 1);
}

TEST(NodeTeams, spread_the_threads_and_leave_reserved_cores) {
    Topology machine{.nodes = {{.os_index = 0, .cores = {0, 1, 2, 3}},
                               {.os_index = 1, .cores = {4, 5}},
                               {.os_index = 2, .cores = {6}}}};
    NodeTeams all(machine, 7);
    ASSERT_EQ(all.count(), 3);
    EXPECT_EQ(all.team(0).threads(), 4);
    EXPECT_EQ(all.team(1).threads(), 2);
    EXPECT_EQ(all.team(2).threads(), 1);
    EXPECT_EQ(all.all().threads(), 7);
    machine.reserved = {0, 1, 6};
    NodeTeams fewer(machine, 4);
    ASSERT_EQ(fewer.count(), 2);
    EXPECT_EQ(fewer.team(0).threads(), 2);
    EXPECT_EQ(fewer.team(1).threads(), 2);
    machine.reserved = {};
    NodeTeams one(machine, 1);
    for (int i = 0; i < one.count(); ++i) EXPECT_EQ(one.team(i).threads(), 1);
    std::atomic<int> calls{0};
    all.each([&](int, Team& team) { team.parallel(4, [&](int64_t) { ++calls; }); });
    EXPECT_EQ(calls, 12);
    machine.reserved = {0, 1, 2, 3, 4, 5, 6};
    EXPECT_THROW(NodeTeams(machine, 1), Error);
}

std::vector<int> cores_of_this_process() {
    cpu_set_t allowed;
    std::vector<int> cores;
    if (sched_getaffinity(0, sizeof(allowed), &allowed) != 0) return cores;
    for (int core = 0; core < CPU_SETSIZE; ++core) {
        if (CPU_ISSET(static_cast<size_t>(core), &allowed)) cores.push_back(core);
    }
    return cores;
}

// One node or two, everyone's team or a node's: nobody runs on a core that is reserved.
TEST(NodeTeams, never_work_on_a_reserved_core) {
    const std::vector<int> cores = cores_of_this_process();
    if (cores.size() < 2) GTEST_SKIP() << "one core";
    const std::vector<int> reserved{cores[1]};
    const Topology one{.nodes = {{.os_index = 0, .cores = cores}}, .reserved = reserved};
    const Topology two{.nodes = {{.os_index = 0, .cores = {cores[0], cores[1]}},
                                 {.os_index = 1, .cores = {cores[0]}}},
                       .reserved = reserved};
    for (const Topology& machine : {one, two}) {
        NodeTeams teams(machine, 2);
        std::atomic<int> calls{0};
        const auto here = [&](int64_t) {
            EXPECT_NE(sched_getcpu(), cores[1]);
            ++calls;
        };
        teams.all().parallel(50, here);
        teams.each([&](int, Team& team) { team.parallel(50, here); });
        EXPECT_EQ(calls, 50 + 50 * teams.count());
    }
}

// The compute stream's thread in the team of all cores beside the optimizer's in the nodes' teams:
// no more bodies at once than there are threads.
TEST(NodeTeams, never_oversubscribe_beside_the_team_of_all_cores) {
    const std::vector<int> cores = cores_of_this_process();
    const Topology machine{.nodes = {{.os_index = 0, .cores = {cores.front()}},
                                     {.os_index = 1, .cores = {cores.back()}}}};
    constexpr int kThreads = 3;
    NodeTeams teams(machine, kThreads);
    std::atomic<int> inside{0}, most{0};
    const auto body = [&](int64_t) {
        const int now = ++inside;
        int seen = most;
        while (seen < now && !most.compare_exchange_weak(seen, now)) {
        }
        std::this_thread::sleep_for(std::chrono::microseconds(200));
        --inside;
    };
    std::thread compute([&] { teams.all().parallel(200, body); });
    for (int round = 0; round < 5; ++round)
        teams.each([&](int, Team& team) { team.parallel(20, body); });
    compute.join();
    EXPECT_LE(most, kThreads);
}

// Two pretended nodes with one real core each: what runs for a node runs on its core.
TEST(NodeTeams, work_on_their_own_cores_at_the_same_time) {
    cpu_set_t allowed;
    ASSERT_EQ(sched_getaffinity(0, sizeof(allowed), &allowed), 0);
    const std::vector<int> cores = cores_of_this_process();
    if (cores.size() < 2) GTEST_SKIP() << "one core";
    const Topology machine{
        .nodes = {{.os_index = 0, .cores = {cores[0]}}, {.os_index = 1, .cores = {cores[1]}}}};
    NodeTeams teams(machine, 2);
    ASSERT_EQ(teams.count(), 2);
    for (int round = 0; round < 20; ++round) {
        std::atomic<int> calls{0};
        teams.each([&](int index, Team& team) {
            team.parallel(5, [&](int64_t) {
                EXPECT_EQ(sched_getcpu(), cores[static_cast<size_t>(index)]);
                ++calls;
            });
        });
        EXPECT_EQ(calls, 10);
    }
    std::atomic<int> met{0};
    teams.each([&](int, Team&) {
        ++met;
        const auto give_up = std::chrono::steady_clock::now() + std::chrono::seconds(20);
        while (met < 2 && std::chrono::steady_clock::now() < give_up) std::this_thread::yield();
        EXPECT_EQ(met, 2) << "the nodes worked one after the other";
    });
    cpu_set_t after;
    ASSERT_EQ(sched_getaffinity(0, sizeof(after), &after), 0);
    EXPECT_TRUE(CPU_EQUAL(&allowed, &after));
}

// On two nodes too, where the loops of the second are begun by other threads.
TEST(Timesheet, notes_what_each_worker_did_of_the_loops_of_one_thread) {
    for (const int nodes : {1, 2}) {
        Topology machine;
        for (int node = 0; node < nodes; ++node)
            machine.nodes.push_back({.os_index = node, .cores = {node}});
        NodeTeams teams(machine, 2);
        EXPECT_EQ(teams.workers(), nodes == 1 ? 2 : 4);
        std::vector<Timesheet::Worker> sheet(static_cast<size_t>(teams.workers()));
        const auto bodies = [&](size_t first, size_t count) {
            int64_t sum = 0;
            for (size_t i = first; i < first + count; ++i) {
                EXPECT_LE(sheet[i].begin, sheet[i].end);
                sum += sheet[i].bodies;
            }
            return sum;
        };
        const auto work = [](int64_t) {
            std::this_thread::sleep_for(std::chrono::microseconds(50));
        };
        {
            const Timesheet noted(sheet);
            teams.each([&](int, Team& team) { team.parallel(40, work); });
            std::thread other([&] { teams.all().parallel(7, work); });  // its own affair
            other.join();
        }
        EXPECT_EQ(bodies(0, sheet.size()), 40 * nodes);
        EXPECT_EQ(bodies(0, static_cast<size_t>(3 - nodes)), 40);
        teams.all().parallel(7, work);
        EXPECT_EQ(bodies(0, sheet.size()), 40 * nodes);
        const Timesheet again(sheet);
        teams.all().parallel(7, work);
        EXPECT_EQ(bodies(nodes == 1 ? 0 : 2, 2), nodes == 1 ? 47 : 7);
        EXPECT_EQ(teams.name_of_worker(1), nodes == 1 ? "worker 1" : "node 1, worker 0");
        EXPECT_EQ(teams.name_of_worker(teams.workers() - 1), "worker 1");
    }
}

TEST(NodeTeams, know_where_memory_lies) {
    std::vector<int> touched(100000, 1);
    const int node = node_of(touched.data());
    EXPECT_GE(node, -1);
    const Topology machine{
        .nodes = {{.os_index = 77, .cores = {0}}, {.os_index = node, .cores = {1}}}};
    NodeTeams teams(machine, 2);
    EXPECT_EQ(teams.index_of(touched.data()), 1);
    EXPECT_EQ(node_of(nullptr), -1);
}

}  // namespace
}  // namespace ferry
