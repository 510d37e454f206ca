#include <linux/mempolicy.h>
#include <sys/syscall.h>
#include <tbb/global_control.h>
#include <tbb/info.h>
#include <tbb/parallel_for.h>
#include <unistd.h>

#include <algorithm>

#include "arena.h"
#include "base/process_limits.h"
#include "base/threads.h"
#include "ferry/error.h"
#include "topology/topology.h"

namespace ferry {
namespace {

std::vector<int> without(const std::vector<int>& cores, std::span<const int> reserved) {
    std::vector<int> left;
    for (const int core : cores) {
        if (std::find(reserved.begin(), reserved.end(), core) == reserved.end())
            left.push_back(core);
    }
    return left;
}

// TBB starts its workers when a loop first wants them; where one cannot be started, it throws on
// the caller's thread or ends the process on a worker's. So they are tried here, and then taken
// before the rest of the run needs threads of its own.
void start_workers(int threads) {
    const int workers = std::min(threads, tbb::info::default_concurrency()) - 1;
    if (workers < 1) return;
    require_threads(workers, "workers of the team");
    constexpr int kNaps = 4;  // each worker has time to come
    tbb::parallel_for(
        0, kNaps * (workers + 1), [](int) { nap_after(400'000); }, tbb::simple_partitioner());
}

}  // namespace

void require_a_core(const Topology& machine) {
    for (const NumaNode& node : machine.nodes)
        if (!without(node.cores, machine.reserved).empty()) return;
    throw Error(Trouble::usage,
                {.what = "every core is reserved for I/O and copies; none is left to compute on",
                 .where = "reserved_cores",
                 .measured = std::to_string(machine.reserved.size()) + " reserved cores",
                 .limit = std::to_string(machine.cores()) + " cores of this process",
                 .remedy = "reserve fewer cores"});
}

struct NodeTeams::WorkerLimit {
    explicit WorkerLimit(size_t most)
        : control(tbb::global_control::max_allowed_parallelism, most) {}
    tbb::global_control control;
};

int node_of(const void* address) {
    int node = -1;
    // Would fault an unmapped page in; only asked of memory that is in use.
    const long rc = syscall(SYS_get_mempolicy, &node, nullptr, 0UL, address,
                            static_cast<unsigned long>(MPOL_F_NODE | MPOL_F_ADDR));
    return rc == 0 ? node : -1;
}

NodeTeams::NodeTeams(const Topology& machine, int threads) {
    FERRY_CHECK(threads >= 1 && !machine.nodes.empty(), std::to_string(threads));
    require_a_core(machine);
    std::vector<std::vector<int>> cores;
    int64_t all = 0;
    for (const NumaNode& node : machine.nodes) {
        std::vector<int> left = without(node.cores, machine.reserved);
        if (left.empty()) continue;
        all += static_cast<int64_t>(left.size());
        os_index_.push_back(node.os_index);
        cores.push_back(std::move(left));
    }
    const bool pinned = cores.size() > 1 || !machine.reserved.empty();
    int64_t before = 0;
    for (const std::vector<int>& mine : cores) {
        // Cumulative rounding: the shares add up to `threads`.
        const int64_t after = before + static_cast<int64_t>(mine.size());
        const int64_t share = after * threads / all - before * threads / all;
        const int here = static_cast<int>(std::max<int64_t>(1, share));
        before = after;
        // The caller of each() serves the first node; the others are for TBB's own workers.
        const int callers = teams_.empty() ? 1 : 0;
        const auto where = pinned ? std::span<const int>(mine) : std::span<const int>();
        teams_.emplace_back(new Team(here, where, callers));
    }
    start_workers(threads);
    int workers = 0;
    for (const auto& team : teams_) {
        team->arena_->first_worker = workers;
        workers += team->threads();
    }
    if (count() == 1) return;
    const auto most = static_cast<size_t>(std::max(threads - 1, count()));
    limit_ = std::make_unique<WorkerLimit>(most);
    std::vector<int> everywhere;
    for (const std::vector<int>& mine : cores)
        everywhere.insert(everywhere.end(), mine.begin(), mine.end());
    // Its workers are those that were started.
    const auto where = machine.reserved.empty() ? std::span<const int>() : std::span(everywhere);
    all_.reset(new Team(threads, where, 1));
    all_->arena_->first_worker = workers;
}

NodeTeams::~NodeTeams() = default;

int NodeTeams::workers() const noexcept {
    const Team& last = all_ ? *all_ : *teams_.back();
    return last.arena_->first_worker + last.threads();
}

std::string NodeTeams::name_of_worker(int worker) const {
    const auto named = [worker](const std::string& where, const Team& team) {
        return where + "worker " + std::to_string(worker - team.arena_->first_worker);
    };
    if (count() == 1) return named("", *teams_[0]);
    if (worker >= all_->arena_->first_worker) return named("", *all_);
    int node = count() - 1;
    while (worker < teams_[static_cast<size_t>(node)]->arena_->first_worker) --node;
    return named("node " + std::to_string(node) + ", ", *teams_[static_cast<size_t>(node)]);
}

int NodeTeams::index_of(const void* address) const {
    if (count() == 1) return 0;
    const auto found = std::find(os_index_.begin(), os_index_.end(), node_of(address));
    return found == os_index_.end() ? 0 : static_cast<int>(found - os_index_.begin());
}

void NodeTeams::run(void (*call)(const void*, int, Team&), const void* body) {
    char start = 0, end = 0;
    const std::span<Timesheet::Worker> sheet = topology::noted;
    const auto one = [&](int index) {
        topology::after(&start);
        const topology::Noting noting(sheet);
        call(body, index, team(index));
        topology::before(&end);
    };
    topology::before(&start);
    for (int i = 1; i < count(); ++i) {
        Team::Arena& other = *team(i).arena_;
        other.arena.execute([&, i] { other.posted.run([&, i] { one(i); }); });
    }
    team(0).arena_->arena.execute([&] { one(0); });
    for (int i = 1; i < count(); ++i) {
        // Inside the arena, so that this thread does the work where no worker is free for it.
        Team::Arena& other = *team(i).arena_;
        other.arena.execute([&] { other.posted.wait(); });
    }
    topology::after(&end);
}

}  // namespace ferry
