// This process among the ranks that mpirun or srun started.
#pragma once

#include <initializer_list>
#include <memory>
#include <string>

#include "comm/comm.h"
#include "ferry/config.h"

namespace ferry::tools {

// An option by which a rank would make other calls than those that were not given it.
struct Option {
    const char* name;
    bool given;
};
// Null where it is alone. Throws usage on every rank where they were not given the same `command`,
// device and options: they would wait for each other in different calls.
std::unique_ptr<comm::Communicator> join_ranks(const Config& config, Executor& executor,
                                               const std::string& command,
                                               std::initializer_list<Option> options);
inline int rank_of(const comm::Communicator* ranks) { return ranks ? ranks->rank() : 0; }

// Runs body(); the other ranks hear at once of what it throws. `ranks` is the communicator, or the
// engine that has it; null where there are no others.
template <class Ranks, class Body>
auto telling(Ranks* ranks, const Body& body) {
    try {
        return body();
    } catch (const std::exception& error) {
        if (ranks) ranks->abandon(error.what());
        throw;
    }
}

}  // namespace ferry::tools
