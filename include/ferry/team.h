// Threads for loops: a team of them, and one on each NUMA node.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "ferry/executor.h"

namespace ferry {

// The cores, NUMA nodes and memory that this process may use.
struct Topology;
std::shared_ptr<const Topology> this_machine();

// `threads` workers over TBB, shared by the CPU device's streams and the optimizer: two parallel
// loops at once never oversubscribe. A team of one makes no caller wait: each works on its own
// thread. What a loop computes never depends on `threads`. With `cores` (OS indices), a thread that
// works in the team runs on those cores for that long.
class Team {
public:
    explicit Team(int threads);
    Team(int threads, std::span<const int> cores);
    ~Team();
    Team(const Team&) = delete;
    Team& operator=(const Team&) = delete;
    int threads() const noexcept;

    // Calls body(i) for i in [0, count), in any order, on any worker and on the calling thread.
    // Returns when all are done. Several threads may call it at once, and a body may call it.
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

// As long as it lives, notes for a trace what each worker of the teams does in the loops that this
// thread calls. A thread has one at a time.
class Timesheet {
public:
    struct Worker {
        Nanos begin = 0, end = 0;  // when its first body began and its last ended
        int64_t bodies = 0;
    };
    // Makes as many rows as NodeTeams::workers(), all empty.
    explicit Timesheet(std::span<Worker> workers);
    ~Timesheet();
    Timesheet(const Timesheet&) = delete;
    Timesheet& operator=(const Timesheet&) = delete;
};

// The NUMA node (OS index) whose memory holds this address; -1 when it is not mapped yet or
// unknown.
int node_of(const void* address);

// A team on each node, so that memory is worked on where it lies, and one of all their cores, for
// work without a place. `threads` are spread in proportion to the nodes' cores, at least one each.
// Reserved cores are left to the threads that drive I/O and copies. On one node both are the same
// team, and without reserved cores nothing is pinned. Several nodes leave a core each to the
// compute stream's thread and the optimizer's. Two nodes have at least one worker, so that two
// threads on two nodes may be three.
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
    // Workers of all teams: each node's, then all()'s where that is another team.
    int workers() const noexcept;
    std::string name_of_worker(int worker) const;
    // Which of the teams is nearest to the address; 0 when unknown.
    int index_of(const void* address) const;

    // Calls body(index, team) once for each node, all at the same time, on a core of that node.
    // Returns when all are done.
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
    std::unique_ptr<Team> all_{};  // where there are several nodes
};

}  // namespace ferry
