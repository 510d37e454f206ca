// This process among the ranks that mpirun or srun started.
#pragma once

#include <memory>

#include "ferry/comm.h"
#include "ferry/config.h"

namespace ferry::tools {

// Null where it is alone.
std::unique_ptr<comm::Communicator> join_ranks(const Config& config, Executor& executor);
inline int rank_of(const comm::Communicator* ranks) { return ranks ? ranks->rank() : 0; }

// Runs body(); what it throws names this rank, where there are others. `rank`: as known by then.
template <class Body>
void naming_rank(const int& rank, const Body& body) {
    try {
        body();
    } catch (const Error& error) {
        if (!comm::launched_as_rank()) throw;
        Problem problem = error.problem();
        problem.where =
            "rank " + std::to_string(rank) + (problem.where.empty() ? "" : ": ") + problem.where;
        throw Error(error.trouble(), std::move(problem));
    }
}

}  // namespace ferry::tools
