// The cores of this machine that a run takes, and its threads on them.
#pragma once

#include <memory>
#include <optional>
#include <vector>

#include "ferry/config.h"
#include "ferry/device.h"
#include "ferry/executor.h"
#include "ferry/lease.h"
#include "ferry/team.h"
#include "topology/topology.h"

namespace ferry::train {

// How many threads compute: as many as asked for, or one for each core that is not reserved. Of
// several GPUs each rank leaves some to its exchanges.
int threads_for(std::optional<int> asked, DeviceKind device, const Topology& machine, int ranks);
// The machine as this process may use it. Throws usage when it has no such core as a reserved one.
Topology machine_for(const Config& config);
// Logs in a line what this process found: nodes, limits, and with several nodes where its GPU and
// its storage paths are. Logs nothing in virtual time.
void log_machine(const std::vector<NvmePath>& paths, const Topology& machine, const Device& device,
                 const Executor& executor);
// The threads that compute, on the cores of the machine that are not reserved.
// `asked` and `machine` are one rank's.
std::unique_ptr<NodeTeams> make_teams(std::optional<int> asked, DeviceKind device,
                                      const Topology& machine, const Executor& executor, int ranks);
// The store hashes on all of them.
swap::Parallel parallel_on(NodeTeams& teams);

}  // namespace ferry::train
