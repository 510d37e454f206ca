#include "alike.h"

#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <utility>
#include <vector>

#include "base/checksum.h"
#include "comm/comm.h"

namespace ferry::comm {

uint64_t machine_id() {
    std::string machine;
    std::getline(std::ifstream("/proc/sys/kernel/random/boot_id"), machine);
    if (machine.empty()) {
        machine.resize(256);
        gethostname(machine.data(), machine.size() - 1);
    }
    return checksum(std::as_bytes(std::span<const char>(machine)));
}

RankPlace place_among(std::span<const uint64_t> machines, int rank) {
    RankPlace place{.rank = rank, .size = static_cast<int>(machines.size()), .local_size = 0};
    for (int other = 0; other < place.size; ++other) {
        if (machines[static_cast<size_t>(other)] != machines[static_cast<size_t>(rank)]) continue;
        if (place.local_size == 0) place.host = other;
        if (other == rank) place.local_rank = place.local_size;
        ++place.local_size;
    }
    return place;
}

PartOfAlike part_among_alike(Communicator& communicator, Executor& executor, uint64_t seen,
                             Topic topic, int place) {
    struct View {
        int64_t host = 0;
        uint64_t seen = 0;
        int32_t place = 0, rank = 0;
    };
    const View mine{communicator.host(), seen, place, communicator.rank()};
    std::vector<View> all(static_cast<size_t>(communicator.size()));
    agree(communicator, executor, std::as_bytes(std::span(&mine, 1)),
          std::as_writable_bytes(std::span(all)), topic);
    PartOfAlike part{.index = 0, .of = 0};
    for (const View& other : all) {
        if (other.host != mine.host || other.seen != mine.seen) continue;
        ++part.of;
        part.index += std::pair(other.place, other.rank) < std::pair(mine.place, mine.rank);
    }
    return part;
}

int gpu_of_rank(Communicator& communicator, Executor& executor) {
    const char* visible = std::getenv("CUDA_VISIBLE_DEVICES");
    const std::string_view gpus = visible ? visible : "all";
    const uint64_t seen = checksum(std::as_bytes(std::span(gpus)));
    return part_among_alike(communicator, executor, seen, {.of = "GPUs"}).index;
}

void require_own_gpus(std::span<const GpuId> gpus, const std::string& name) {
    for (size_t later = 0; later < gpus.size(); ++later) {
        const auto same = std::ranges::find(gpus.first(later), gpus[later]);
        if (same == gpus.first(later).end()) continue;
        const auto first = same - gpus.begin();
        throw Error(
            Trouble::usage,
            {.what = "two ranks use the same GPU",
             .where = "GPU of ranks " + std::to_string(first) + " and " + std::to_string(later),
             .measured = name,
             .limit = "one rank on a GPU",
             .remedy = "start as many ranks on a machine as CUDA_VISIBLE_DEVICES names GPUs"});
    }
}

}  // namespace ferry::comm
