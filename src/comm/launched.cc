#include <charconv>
#include <cstdlib>
#include <cstring>

#include "launched.h"

namespace ferry::comm {

std::optional<int> launched_ranks() {
    // Open MPI; MPICH and its descendants, srun --mpi=pmi2; srun alone. A batch script under Slurm
    // has SLURM_NTASKS too and is one process; only a step has its own number of tasks.
    for (const char* name : {"OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS"}) {
        const char* text = std::getenv(name);
        if (!text) continue;
        int ranks = 0;
        const char* end = text + std::strlen(text);
        const auto [stop, status] = std::from_chars(text, end, ranks);
        if (status == std::errc() && stop == end && ranks > 0) return ranks;
    }
    return std::nullopt;
}

bool launched_as_rank() { return launched_ranks().value_or(1) > 1; }

}  // namespace ferry::comm
