#include "topology/topology.h"

#include <hwloc.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <limits>
#include <sstream>
#include <string>
#include <string_view>

#include "attached.h"
#include "base/log.h"
#include "cgroup.h"
#include "ferry/error.h"
#include "ferry/team.h"
#include "ferry/units.h"

namespace ferry {
namespace {

struct Bitmap {
    hwloc_bitmap_t set = hwloc_bitmap_alloc();
    Bitmap() = default;
    Bitmap(const Bitmap&) = delete;
    Bitmap& operator=(const Bitmap&) = delete;
    ~Bitmap() { hwloc_bitmap_free(set); }
};

struct Hwloc {
    hwloc_topology_t handle = nullptr;
    Hwloc() {
        if (hwloc_topology_init(&handle) != 0 || hwloc_topology_load(handle) != 0) {
            throw Error(Trouble::usage,
                        {.what = "hwloc cannot read this machine's topology",
                         .where = "HWLOC_SYNTHETIC, HWLOC_XMLFILE or /sys",
                         .remedy = "unset the HWLOC_ variables, or check with lstopo"});
        }
    }
    // hwloc passes over a description that it cannot read, and looks at the machine instead.
    void warn_of_unread_description() const {
        const char* wish = std::getenv("HWLOC_SYNTHETIC");
        if (!wish || !*wish) return;
        const char* backend = hwloc_obj_get_info_by_name(hwloc_get_root_obj(handle), "Backend");
        if (backend && std::string_view(backend) == "Synthetic") return;
        log_warn("hwloc did not take HWLOC_SYNTHETIC=\"" + std::string(wish) +
                 "\"; the topology is this machine's own");
    }
    Hwloc(const Hwloc&) = delete;
    Hwloc& operator=(const Hwloc&) = delete;
    ~Hwloc() { hwloc_topology_destroy(handle); }
};

// The processing units that hwloc allows (less cgroup cpusets) and the affinity mask leaves.
void allowed_units(hwloc_topology_t machine, hwloc_bitmap_t allowed) {
    hwloc_bitmap_copy(allowed, hwloc_topology_get_allowed_cpuset(machine));
    if (!hwloc_topology_is_thissystem(machine)) return;
    Bitmap bound, both;
    if (hwloc_get_cpubind(machine, bound.set, HWLOC_CPUBIND_PROCESS) != 0) return;
    hwloc_bitmap_and(both.set, allowed, bound.set);
    // A synthetic topology may number its units differently from the machine under it.
    if (!hwloc_bitmap_iszero(both.set)) hwloc_bitmap_copy(allowed, both.set);
}

// One unit a core; a unit taken by one node is not given to a second that shares its cores
// (machines with two kinds of memory have such nodes).
std::vector<int> take_cores(hwloc_topology_t machine, hwloc_const_cpuset_t of,
                            hwloc_bitmap_t allowed) {
    std::vector<int> units;
    hwloc_obj_t core = nullptr;
    while ((core = hwloc_get_next_obj_inside_cpuset_by_type(machine, of, HWLOC_OBJ_CORE, core))) {
        Bitmap usable;
        hwloc_bitmap_and(usable.set, core->cpuset, allowed);
        if (hwloc_bitmap_iszero(usable.set)) continue;
        units.push_back(hwloc_bitmap_first(usable.set));
        hwloc_bitmap_andnot(allowed, allowed, core->cpuset);
    }
    if (!units.empty()) return units;
    Bitmap usable;  // virtual machines without core objects
    hwloc_bitmap_and(usable.set, of, allowed);
    for (int unit = hwloc_bitmap_first(usable.set); unit >= 0;
         unit = hwloc_bitmap_next(usable.set, unit)) {
        units.push_back(unit);
    }
    hwloc_bitmap_andnot(allowed, allowed, usable.set);
    return units;
}

// The cores of all nodes.
int count_cores(hwloc_topology_t machine, hwloc_bitmap_t allowed) {
    size_t count = 0;
    hwloc_obj_t node = nullptr;
    while ((node = hwloc_get_next_obj_by_type(machine, HWLOC_OBJ_NUMANODE, node)))
        count += take_cores(machine, node->cpuset, allowed).size();
    return static_cast<int>(count);
}

int64_t cache_bytes(hwloc_topology_t machine, hwloc_obj_type_t type) {
    const hwloc_obj_t cache = hwloc_get_obj_by_type(machine, type, 0);
    return cache ? static_cast<int64_t>(cache->attr->cache.size) : 0;
}

int64_t memlock_limit() {
    rlimit limit{};
    if (getrlimit(RLIMIT_MEMLOCK, &limit) != 0) return 0;
    const auto most = static_cast<rlim_t>(std::numeric_limits<int64_t>::max());
    return static_cast<int64_t>(std::min(limit.rlim_cur, most));
}

int64_t resident_bytes() {
    int64_t size = 0, resident = 0;
    std::ifstream("/proc/self/statm") >> size >> resident;
    return resident * sysconf(_SC_PAGESIZE);
}

void read_limits(Topology& found) {
    std::ostringstream membership;
    membership << std::ifstream("/proc/self/cgroup").rdbuf();
    const auto limits = topology::read_cgroup(membership.str(), "/sys/fs/cgroup");
    found.cpu_quota = limits.cpus;
    found.memlock_limit_bytes = memlock_limit();
    if (limits.memory_bytes > 0) {
        // Also above what is installed: virtual machines may be given more memory as they use it.
        found.memory_limit_bytes = limits.memory_bytes;
        found.memory_left_bytes = limits.memory_left_bytes;
        return;
    }
    found.memory_limit_bytes = int64_t{sysconf(_SC_PHYS_PAGES)} * sysconf(_SC_PAGESIZE);
    found.memory_left_bytes = found.memory_limit_bytes - resident_bytes();
}

}  // namespace

int Topology::cores() const {
    size_t count = 0;
    for (const NumaNode& node : nodes) count += node.cores.size();
    const int all = static_cast<int>(count);
    return cpu_quota > 0 ? std::clamp(static_cast<int>(cpu_quota), 1, all) : all;
}

Topology with_part_of_cores(Topology machine, int part, int parts) {
    if (parts == 1) return machine;
    const auto is_reserved = [&](int core) {
        return std::ranges::count(machine.reserved, core) > 0;
    };
    int64_t all = 0;
    for (const NumaNode& node : machine.nodes)
        all += std::ssize(node.cores) - std::ranges::count_if(node.cores, is_reserved);
    const int64_t first = all * part / parts;
    const int64_t last = std::max(first + 1, all * (part + 1) / parts);
    int64_t at = 0;
    for (NumaNode& node : machine.nodes) {
        std::vector<int> cores;
        int64_t shared = 0, mine = 0;
        for (const int core : node.cores) {
            if (is_reserved(core)) {
                cores.push_back(core);
                continue;
            }
            if (at >= first && at < last) {
                cores.push_back(core);
                ++mine;
            }
            ++shared;
            ++at;
        }
        node.cores = std::move(cores);
        node.memory_bytes = node.memory_bytes * mine / std::max<int64_t>(shared, 1);
    }
    std::erase_if(machine.nodes, [](const NumaNode& node) { return node.cores.empty(); });
    return machine;
}

Topology with_part_of_limits(Topology machine, int processes) {
    machine.memory_limit_bytes /= processes;
    machine.memory_left_bytes /= processes;
    machine.cpu_quota /= processes;
    return machine;
}

Topology discover_topology() {
    const Hwloc machine;
    machine.warn_of_unread_description();
    Bitmap allowed, unbound;
    allowed_units(machine.handle, allowed.set);
    hwloc_bitmap_copy(unbound.set, hwloc_topology_get_allowed_cpuset(machine.handle));

    Topology found;
    found.host_cores = count_cores(machine.handle, unbound.set);
    hwloc_obj_t node = nullptr;
    while ((node = hwloc_get_next_obj_by_type(machine.handle, HWLOC_OBJ_NUMANODE, node))) {
        NumaNode here{.os_index = static_cast<int>(node->os_index),
                      .cores = take_cores(machine.handle, node->cpuset, allowed.set),
                      .memory_bytes = static_cast<int64_t>(node->attr->numanode.local_memory)};
        if (!here.cores.empty()) found.nodes.push_back(std::move(here));
    }
    FERRY_CHECK(!found.nodes.empty(), "no NUMA node has a core this process may use");
    found.l3_bytes = cache_bytes(machine.handle, HWLOC_OBJ_L3CACHE);
    if (found.nodes.size() > 1) found.attached = topology::find_attached();
    read_limits(found);
    return found;
}

std::shared_ptr<const Topology> this_machine() {
    return std::make_shared<const Topology>(discover_topology());
}

int node_of_device(const Topology& machine, std::string_view name) {
    const auto found = std::ranges::find(machine.attached, name, &Attached::name);
    return found == machine.attached.end() ? -1 : found->node;
}

int node_of_path(const Topology& machine, const std::string& path) {
    struct stat status {};
    if (stat(path.c_str(), &status) != 0) return -1;
    const dev_t device = S_ISBLK(status.st_mode) ? status.st_rdev : status.st_dev;
    const auto drives = topology::drives_of(major(device), minor(device), "/sys");
    if (drives.empty()) return -1;
    const int node = node_of_device(machine, drives.front());
    const auto there = [&](const std::string& drive) {
        return node_of_device(machine, drive) == node;
    };
    return std::ranges::all_of(drives, there) ? node : -1;
}

std::string describe(const Topology& machine) {
    std::string text;
    const auto add = [&](const std::string& more) { text += (text.empty() ? "" : "; ") + more; };
    for (const NumaNode& node : machine.nodes) {
        const std::string name = "NUMA node " + std::to_string(node.os_index) + ": ";
        add((machine.nodes.size() > 1 ? name : "") + std::to_string(node.cores.size()) +
            " cores, " + format_bytes(node.memory_bytes));
    }
    if (machine.cpu_quota > 0) add("a quota of " + std::to_string(machine.cores()) + " cores");
    for (const Attached& device : machine.attached) {
        if (device.gpu && device.node >= 0)
            add("GPU " + device.name + " at node " + std::to_string(device.node));
    }
    add("memory limit " + format_bytes(machine.memory_limit_bytes) + ", " +
        format_bytes(machine.memory_left_bytes) + " of it left");
    const bool unlimited = machine.memlock_limit_bytes == std::numeric_limits<int64_t>::max();
    add("locked memory " +
        (unlimited ? "unlimited" : "up to " + format_bytes(machine.memlock_limit_bytes)));
    return text;
}

}  // namespace ferry
