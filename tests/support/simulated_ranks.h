// Several ranks in one process, for tests of everything above comm. Each has a thread and an
// executor of its own, simulated or not. Simulated executors share their clocks, and one seed is
// one run. An operation ends after the last rank has come to it, on each rank at a virtual time of
// its own. A rank's kernels and copies go on meanwhile. What arrives early is garbage, and what
// leaves must not change until the operation has ended.
//
//   run_ranks({.size = 3, .seed = seed}, [](comm::Communicator& ranks, Executor& executor) {...});
#pragma once

#include <exception>
#include <functional>
#include <vector>

#include "comm/comm.h"

namespace ferry::comm {

struct SimulatedRanks {
    int size = 1;
    uint64_t seed = 1;
    bool threads = false;  // real executors and real time
    int hosts = 1;         // to which the ranks are dealt in turn
    CommOptions options{};
};
using RankBody = std::function<void(Communicator&, Executor&)>;

// Runs `body` on every rank. A rank whose body throws, or returns while others still wait for it,
// is one whose process ended. What each rank threw, by rank.
std::vector<std::exception_ptr> outcomes_of(const SimulatedRanks& ranks, const RankBody& body);
// The same, and throws the first error that is no mere consequence (Trouble::rank_lost), else the
// first.
void run_ranks(const SimulatedRanks& ranks, const RankBody& body);

}  // namespace ferry::comm
