// A run of several ranks: what of the configuration and of the machine is a rank's own, and what
// the ranks compare before the first step. `ranks` is null where there is only one.
#pragma once

#include <memory>
#include <span>
#include <string_view>
#include <vector>

#include "comm/comm.h"
#include "data/tokens.h"
#include "ferry/config.h"
#include "ferry/device.h"
#include "ferry/train.h"
#include "model/model.h"
#include "planner/request.h"
#include "swap/schedule.h"
#include "topology/topology.h"

namespace ferry::train {

// A rank among those of the run and among those of its host.
struct World {
    int rank = 0, ranks = 1, local_ranks = 1;
};

// The configuration as one of its ranks goes by it: its micro-batches, and its part of what the
// ranks of a host share. Throws usage where the micro-batches cannot be divided.
Config config_of_rank(const Config& config, const World& world);
// The same of what a plan of the whole run is asked for. Throws usage as well.
planner::PlanRequest of_rank(planner::PlanRequest request, const World& world);

// Directories of this rank's own below the paths of the configuration, as config_of_rank names
// them; removed at the end.
class RankDirectories {
public:
    RankDirectories(const Config& config, const Config& of_rank, const World& world);
    ~RankDirectories();
    RankDirectories(const RankDirectories&) = delete;
    RankDirectories& operator=(const RankDirectories&) = delete;

private:
    std::vector<std::string> made_;
};

// A run's device, and the ranks that it talks to. Communication ends before the device goes.
struct ComputeContext {
    std::unique_ptr<Device> device{};
    std::unique_ptr<comm::Communicator> ranks{};

    // Takes the ranks out of `runtime`.
    void open(const Config& config, Runtime& runtime);
    World world() const;
    // This rank goes no further: the others learn it at once.
    void abandon(const char* why) const noexcept;
};

// Gathers each rank's fact to all ranks. Blocking.
template <class Fact>
std::vector<Fact> gather(comm::Communicator& ranks, Executor& executor, const Fact& mine,
                         const char* of) {
    std::vector<Fact> all(static_cast<size_t>(ranks.size()));
    comm::agree(ranks, executor, std::as_bytes(std::span(&mine, 1)),
                std::as_writable_bytes(std::span(all)), {.of = of});
    return all;
}

// The cores and the memory of this rank. Ranks of a host that may run on the same cores share those
// out in equal parts, in the order of the nodes that their GPUs (`gpu`: PCI address, or empty) hang
// off; others have been given their own. The host's memory and its quota are everybody's in any
// case. Warns where ranks were bound to less than their part of the host's cores.
Topology machine_of_rank(Topology machine, std::string_view gpu, comm::Communicator* ranks,
                         Executor& executor);

// Compares the program and the keys of the configuration, before anything else is done with them.
// Throws usage on every rank, naming the rank and what differs.
void require_same_config(comm::Communicator& ranks, Executor& executor, const Config& config);
// Compares the rest of what fixes the numbers. `kernels` are OpenBLAS's, where it computes: it
// chooses different ones on different processors.
void require_same_run(comm::Communicator& ranks, Executor& executor, const std::string& kernels,
                      const std::string& numerics, const TokenFileInfo& tokens,
                      const std::string& first_weights);
// The same for what the ranks will say to each other, of all schedules.
void require_same_exchanges(comm::Communicator& ranks, Executor& executor,
                            std::span<const swap::Schedule* const> schedules);

}  // namespace ferry::train
