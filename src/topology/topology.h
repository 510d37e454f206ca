// The machine as far as this process may use it.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "topology/attached.h"

namespace ferry {

struct NumaNode {
    int os_index = 0;
    std::vector<int>
        cores{};  // OS indices of one processing unit a physical core, allowed ones only
    int64_t memory_bytes = 0;
};

struct Topology {
    std::vector<NumaNode> nodes{};
    // The cores that are for the threads of I/O and copies alone; a machine as it was found has
    // none.
    std::vector<int> reserved{};
    std::vector<Attached> attached{};  // on several nodes; on one there is nothing to choose
    int64_t l3_bytes = 0;
    int64_t memory_limit_bytes = 0;  // the cgroup's limit, else the machine's memory
    // The part of that limit that was free when it was read. Memory of this and other processes of
    // the cgroup counts as used; files that the kernel merely caches do not. Without a cgroup's
    // limit only this process counts.
    int64_t memory_left_bytes = 0;
    int64_t memlock_limit_bytes = 0;  // RLIMIT_MEMLOCK, which io_uring's registration is held to
    double cpu_quota = 0;             // of the cgroup, in cores; 0: none
    int host_cores = 0;  // as in `nodes`, but without the affinity mask: what a process may be
                         // given here
    // How many threads can run at once: the nodes' cores, or fewer under a quota. At least 1.
    int cores() const;
};

// Reads hwloc (HWLOC_SYNTHETIC is honoured; one that hwloc cannot read is warned of), the affinity
// mask, the cgroup's limits and RLIMIT_MEMLOCK.
Topology discover_topology();

// The node of a GPU (PCI address) or a drive (the kernel's name); -1: of none alone, or not there.
int node_of_device(const Topology& machine, std::string_view name);
// The node of all drives below a directory or block device; -1 where they are on several, or where
// there is none: tmpfs, a network, a file system with device numbers of its own.
int node_of_path(const Topology& machine, const std::string& path);

// Throws usage where every core is reserved.
void require_a_core(const Topology& machine);

// The machine as a line of the log.
std::string describe(const Topology& machine);

// The machine with one of `parts` equal parts of its cores, which as many processes share: a run of
// them, node by node. Where cores are fewer than parts, some serve several; those that are reserved
// serve all.
Topology with_part_of_cores(Topology machine, int part, int parts);
// The machine with a process's equal part of what bounds all of `processes` together: the memory
// limit, what is left of it, and the quota. The cores that each runs on do not matter.
Topology with_part_of_limits(Topology machine, int processes);

}  // namespace ferry
