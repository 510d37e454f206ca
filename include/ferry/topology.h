// What the machine offers this process, and a team of threads that uses it.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "ferry/base.h"

namespace ferry {

struct NumaNode {
    int os_index = 0;
    std::vector<int>
        cores{};  // OS indices of one processing unit a physical core, allowed ones only
    int64_t memory_bytes = 0;
};

// A GPU or a drive, and the node that it hangs off: what it moves to or from there is nearest.
struct Attached {
    std::string name{};  // "0000:17:00.0", "nvme0n1"
    bool gpu = false;
    int node = -1;  // OS index; -1: of no node alone
};

struct Topology {
    std::vector<NumaNode> nodes{};
    // Of the nodes' cores, those that are for the threads of I/O and copies alone; as it was found,
    // a machine has none.
    std::vector<int> reserved{};
    std::vector<Attached> attached{};  // on several nodes; on one there is nothing to choose
    int64_t l3_bytes = 0;
    int64_t memory_limit_bytes = 0;  // the cgroup's limit, else the machine's memory
    // Of that limit, what was not in use when it was read: what other processes of the cgroup and
    // this one held counts as used, files that the kernel merely caches do not. Without a cgroup's
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

// What was found, as a line of the log.
std::string describe(const Topology& machine);

// The machine with one of `parts` equal parts of its cores, which as many processes share: a run of
// them, node by node. Where cores are fewer than parts, some serve several; those that are reserved
// serve all.
Topology with_part_of_cores(Topology machine, int part, int parts);
// The machine with a process's equal part of what bounds all of `processes` together, whatever
// cores each of them runs on: the memory limit, what is left of it, and the quota.
Topology with_part_of_limits(Topology machine, int processes);

// `threads` workers over TBB, shared by the CPU device's streams and the optimizer, so that two
// parallel loops at once never oversubscribe, but for a team of one: it has no place to wait in,
// and each caller works on its own thread. What a loop computes never depends on `threads`. With
// `cores` (OS indices), whoever works in the team runs on those cores for that long.
class Team {
public:
    explicit Team(int threads);
    Team(int threads, std::span<const int> cores);
    ~Team();
    Team(const Team&) = delete;
    Team& operator=(const Team&) = delete;
    int threads() const noexcept;

    // Calls body(i) for i in [0, count), in any order, on any worker and on the calling thread;
    // returns when all are done. May be called by several threads at once, and from within a body.
    template <class Body>
    void parallel(int64_t count, const Body& body) {
        run(
            count, [](const void* b, int64_t i) { (*static_cast<const Body*>(b))(i); }, &body);
    }

private:
    friend class NodeTeams;
    struct Arena;
    // `callers`: places kept free for threads that come with work of their own.
    Team(int threads, std::span<const int> cores, int callers);
    void run(int64_t count, void (*call)(const void*, int64_t), const void* body);
    std::unique_ptr<Arena> arena_;
};

// What each worker of the teams does, as long as this lives, of the loops that this thread calls:
// for a trace. One at a time on a thread.
class Timesheet {
public:
    struct Worker {
        Nanos begin = 0, end = 0;  // of its first body and of its last
        int64_t bodies = 0;
    };
    // As many as NodeTeams::workers(), all empty.
    explicit Timesheet(std::span<Worker> workers);
    ~Timesheet();
    Timesheet(const Timesheet&) = delete;
    Timesheet& operator=(const Timesheet&) = delete;
};

// The NUMA node (OS index) whose memory holds this address; -1 when it is not mapped yet or
// unknown.
int node_of(const void* address);

// A team on each node, so that memory is worked on where it lies, and one of all their cores, for
// work without a place. `threads` are spread in proportion to the nodes' cores, at least one each;
// reserved cores are left to the threads that drive I/O and copies. On one node both are the same
// team, and without reserved cores nothing is pinned. On several, workers are as many as leave a
// core each for two threads that bring work of their own, the compute stream's and the optimizer's;
// on two nodes at least one, so that two threads on two nodes may be three.
class NodeTeams {
public:
    // Throws usage where every core is reserved.
    NodeTeams(const Topology& machine, int threads);
    ~NodeTeams();
    NodeTeams(const NodeTeams&) = delete;
    NodeTeams& operator=(const NodeTeams&) = delete;
    int count() const noexcept { return static_cast<int>(teams_.size()); }
    Team& team(int index) { return *teams_[static_cast<size_t>(index)]; }
    Team& all() { return all_ ? *all_ : *teams_.front(); }
    // Of all teams: those of each node's, then of all() where that is another.
    int workers() const noexcept;
    std::string name_of_worker(int worker) const;
    // Which of the teams is nearest to the address; 0 when unknown.
    int index_of(const void* address) const;

    // Calls body(index, team) once for each node, all at the same time, on a core of that node;
    // returns when all are done.
    template <class Body>
    void each(const Body& body) {
        run([](const void* b, int index, Team& t) { (*static_cast<const Body*>(b))(index, t); },
            &body);
    }

private:
    void run(void (*call)(const void*, int, Team&), const void* body);
    struct WorkerLimit;
    std::vector<int> os_index_{};
    std::unique_ptr<WorkerLimit> limit_;
    std::vector<std::unique_ptr<Team>> teams_{};
    std::unique_ptr<Team> all_{};  // of several nodes
};

}  // namespace ferry
