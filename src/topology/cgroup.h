// The limits that a control group puts on this process, for cgroup v1 and v2.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace ferry::topology {

struct CgroupLimits {
    int64_t memory_bytes = 0;  // 0: no limit
    // Under a limit: what the group that is nearest to its own has left. Of what a group uses, the
    // kernel's caches of files and its reclaimable slabs are left too; tmpfs is not.
    int64_t memory_left_bytes = 0;
    double cpus = 0;  // quota / period; 0: no limit
};

// `membership` is the text of /proc/self/cgroup, `mount` where the hierarchies are mounted
// (/sys/fs/cgroup). A limit of any ancestor holds too, so the least of the chain is returned.
// Inside a container the named folder may be out of sight; the mount point itself then is the
// container's own group and is read last in any case. Files that do not exist are no limit.
CgroupLimits read_cgroup(std::string_view membership, const std::string& mount);

}  // namespace ferry::topology
