#include <tbb/info.h>
#include <tbb/parallel_for.h>

#include <algorithm>
#include <chrono>
#include <string>
#include <vector>

#include "arena.h"
#include "base/process_limits.h"
#include "ferry/error.h"
#include "ferry/executor.h"

namespace ferry {
namespace topology {
namespace {

// The clock of the executor that runs on threads.
Nanos now() {
    return std::chrono::steady_clock::now().time_since_epoch() / std::chrono::nanoseconds(1);
}

cpu_set_t set_of(std::span<const int> cores) {
    cpu_set_t set;
    CPU_ZERO(&set);
    for (const int core : cores) CPU_SET(static_cast<size_t>(core), &set);
    return set;
}

// More workers than processors would only be a warning of TBB's.
int at_once(int threads) { return std::min(threads, tbb::info::default_concurrency()); }

// A thread may enter a second arena from within the first.
thread_local std::vector<cpu_set_t> affinity_before;

}  // namespace

Pin::Pin(tbb::task_arena& arena, std::span<const int> cores)
    : task_scheduler_observer(arena), cores_(set_of(cores)) {
    observe(true);
}

Pin::~Pin() { observe(false); }

void Pin::on_scheduler_entry(bool) {
    cpu_set_t& before = affinity_before.emplace_back();
    if (sched_getaffinity(0, sizeof(cpu_set_t), &before) != 0 ||
        sched_setaffinity(0, sizeof(cpu_set_t), &cores_) != 0) {
        CPU_ZERO(&before);  // a synthetic topology: nothing to undo
    }
}

void Pin::on_scheduler_exit(bool) {
    if (affinity_before.empty()) return;
    const cpu_set_t before = affinity_before.back();
    affinity_before.pop_back();
    if (CPU_COUNT(&before) > 0) sched_setaffinity(0, sizeof(cpu_set_t), &before);
}

thread_local std::span<Timesheet::Worker> noted;

}  // namespace topology

Timesheet::Timesheet(std::span<Worker> workers) {
    FERRY_CHECK(topology::noted.empty(), "one at a time");
    topology::noted = workers;
}
Timesheet::~Timesheet() { topology::noted = {}; }

Team::Team(int threads) : Team(threads, {}) {}

Team::Team(int threads, std::span<const int> cores) : Team(threads, cores, 1) {
    // TBB starts its workers when a loop first wants them, and then has no word for the limit.
    if (topology::at_once(threads) > 1)
        require_threads(topology::at_once(threads) - 1, "workers of the team");
}

Team::Team(int threads, std::span<const int> cores, int callers) {
    FERRY_CHECK(threads >= 1, std::to_string(threads));
    arena_ = std::make_unique<Arena>();
    arena_->threads = threads;
    arena_->arena.initialize(topology::at_once(threads), static_cast<unsigned>(callers));
    if (cores.empty()) return;
    arena_->arena.initialize();
    arena_->pin.emplace(arena_->arena, cores);
}

Team::~Team() = default;

int Team::threads() const noexcept { return arena_->threads; }

void Team::run(int64_t count, void (*call)(const void*, int64_t), const void* body) {
    if (count <= 0) return;
    char start = 0, end = 0;
    const std::span<Timesheet::Worker> sheet = topology::noted;
    const auto noted = [&](int64_t i) {
        const int own = arena_->threads > 1 ? tbb::this_task_arena::current_thread_index() : 0;
        const int worker = arena_->first_worker + own;
        Timesheet::Worker& mine = sheet[static_cast<size_t>(worker)];
        if (mine.bodies++ == 0) mine.begin = topology::now();
        call(body, i);
        mine.end = topology::now();
    };
    const auto one = [&](int64_t i) {
        topology::after(&start);
        const topology::AtEnd<topology::before> done(&end);
        sheet.empty() ? call(body, i) : noted(i);
    };
    const auto all = [&] {
        if (arena_->threads == 1 || count == 1) {
            for (int64_t i = 0; i < count; ++i) one(i);
        } else {
            tbb::parallel_for(int64_t{0}, count, one, tbb::simple_partitioner());
        }
    };
    topology::before(&start);
    const topology::AtEnd<topology::after> all_done(&end);
    // One unpinned thread needs no arena.
    if (arena_->threads == 1 && !arena_->pin) {
        all();
    } else {
        arena_->arena.execute(all);
    }
}

}  // namespace ferry
