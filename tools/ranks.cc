#include "ranks.h"

namespace ferry::tools {

std::unique_ptr<comm::Communicator> join_ranks(const Config& config, Executor& executor) {
    if (!comm::launched_as_rank()) return nullptr;
    return comm::make_mpi(executor, {.timeout_seconds = config.zero.timeout_seconds});
}

}  // namespace ferry::tools
