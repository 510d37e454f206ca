// GPUs and drives, and the NUMA nodes that they hang off.
#pragma once

#include <string>
#include <vector>

namespace ferry {

// A GPU or a drive, and the node that it hangs off: what it moves to or from there is nearest.
struct Attached {
    std::string name{};  // "0000:17:00.0", "nvme0n1"
    bool gpu = false;
    int node = -1;  // OS index; -1: of no node alone
};

namespace topology {

// The devices as hwloc describes them; empty where it cannot.
std::vector<Attached> find_attached();

// The drives that hold a block device, by the kernel's names: of a partition its whole drive, of an
// array or mapping (md, dm) what it is made of. `sys` is where sysfs is mounted. Empty where there
// is no such block device.
std::vector<std::string> drives_of(unsigned major, unsigned minor, const std::string& sys);

}  // namespace topology

}  // namespace ferry
