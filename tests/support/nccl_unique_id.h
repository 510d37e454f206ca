// The unique id that a runtime with ranks of its own and no MPI brings. Here the ranks have met to
// agree on it.
#pragma once

#ifdef FERRY_NCCL
#include <nccl.h>

#include <cstring>
#include <span>
#include <vector>

#include "comm/comm.h"

namespace ferry::comm {

inline NcclRanks with_unique_id(Communicator& ranks, Executor& executor) {
    ncclUniqueId id{};
    if (ranks.rank() == 0) ncclGetUniqueId(&id);
    std::vector<ncclUniqueId> all(static_cast<size_t>(ranks.size()));
    agree(ranks, executor, std::as_bytes(std::span(&id, 1)), std::as_writable_bytes(std::span(all)),
          {.of = "unique ids"});
    NcclRanks found{.rank = ranks.rank(), .size = ranks.size()};
    std::memcpy(found.unique_id.data(), &all[0], sizeof(id));
    return found;
}

}  // namespace ferry::comm
#endif
