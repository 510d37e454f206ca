#include <algorithm>
#include <array>
#include <charconv>
#include <cstdlib>
#include <cstring>

#include "launched.h"

namespace ferry::comm {

namespace {

// The variables that a launcher sets in the environment.
struct Launcher {
    const char* ranks;
    const char* rank;
};
// Open MPI; MPICH and its descendants, srun --mpi=pmi2; srun alone. A batch script under Slurm has
// SLURM_NTASKS too and is one process; only a step has its own number of tasks.
constexpr std::array<Launcher, 3> kLaunchers{{{"OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"},
                                              {"PMI_SIZE", "PMI_RANK"},
                                              {"SLURM_STEP_NUM_TASKS", "SLURM_PROCID"}}};

std::optional<int> number_in(const char* name) {
    const char* text = std::getenv(name);
    if (!text) return std::nullopt;
    int number = 0;
    const char* end = text + std::strlen(text);
    const auto [stop, status] = std::from_chars(text, end, number);
    if (status != std::errc() || stop != end || number < 0) return std::nullopt;
    return number;
}

// The first that gives a number of ranks.
const Launcher* the_launcher() {
    const auto* found = std::ranges::find_if(kLaunchers, [](const Launcher& launcher) {
        return number_in(launcher.ranks).value_or(0) > 0;
    });
    return found == kLaunchers.end() ? nullptr : found;
}

}  // namespace

std::optional<int> launched_ranks() {
    const Launcher* launcher = the_launcher();
    return launcher ? number_in(launcher->ranks) : std::nullopt;
}

bool launched_as_rank() { return launched_ranks().value_or(1) > 1; }

std::optional<int> launched_rank() {
    return launched_as_rank() ? number_in(the_launcher()->rank) : std::nullopt;
}

}  // namespace ferry::comm
