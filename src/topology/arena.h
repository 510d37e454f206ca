// The TBB side of Team, shared by team.cc and node_teams.cc.
#pragma once

#include <sched.h>
#include <tbb/task_arena.h>
#include <tbb/task_group.h>
#include <tbb/task_scheduler_observer.h>

#include <optional>
#include <span>
#include <utility>

#include "ferry/team.h"

// TBB's own library is not instrumented, so ThreadSanitizer does not see how it orders threads. The
// files that include it are compiled without instrumentation too, and tell the order themselves.
#ifdef FERRY_TSAN
extern "C" void __tsan_acquire(void*);
extern "C" void __tsan_release(void*);
#endif

namespace ferry {
namespace topology {

// Between a before() and an after() of the same object nothing is concurrent: what the thread did
// before the first is seen by who comes after the second.
inline void before([[maybe_unused]] const void* point) {
#ifdef FERRY_TSAN
    __tsan_release(const_cast<void*>(point));
#endif
}
inline void after([[maybe_unused]] const void* point) {
#ifdef FERRY_TSAN
    __tsan_acquire(const_cast<void*>(point));
#endif
}

// The same where a scope ends, by an exception too: TBB carries it to another thread.
template <void (*kTell)(const void*)>
struct AtEnd {
    explicit AtEnd(const void* at) : point(at) {}
    AtEnd(const AtEnd&) = delete;
    AtEnd& operator=(const AtEnd&) = delete;
    ~AtEnd() { kTell(point); }
    const void* point;
};

// Every thread that enters the arena runs on the given cores, and goes back to where it was when it
// leaves: TBB lends the same worker to other arenas.
class Pin : public tbb::task_scheduler_observer {
public:
    Pin(tbb::task_arena& arena, std::span<const int> cores);
    ~Pin() override;
    void on_scheduler_entry(bool) override;
    void on_scheduler_exit(bool) override;

private:
    cpu_set_t cores_;
};

// The timesheet of this thread's loops; empty: none.
extern thread_local std::span<Timesheet::Worker> noted;

// The same on another thread that works for this one.
class Noting {
public:
    explicit Noting(std::span<Timesheet::Worker> sheet) : before_(std::exchange(noted, sheet)) {}
    ~Noting() { noted = before_; }
    Noting(const Noting&) = delete;
    Noting& operator=(const Noting&) = delete;

private:
    const std::span<Timesheet::Worker> before_;
};

}  // namespace topology

struct Team::Arena {
    int threads;
    int first_worker = 0;  // its first thread's number in a Timesheet
    tbb::task_arena arena;
    tbb::task_group posted{};  // work that NodeTeams handed over and waits for
    std::optional<topology::Pin> pin{};
};

}  // namespace ferry
