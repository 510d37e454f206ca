// Time and threads: whatever runs beside the step thread runs on an executor, real or simulated.
#pragma once

#include <cstdint>
#include <limits>
#include <memory>
#include <string>
#include <string_view>

namespace ferry {

using Nanos = int64_t;  // monotonic, from an arbitrary start
constexpr Nanos kForever = std::numeric_limits<Nanos>::max();

// Work to be done, without an allocation. `run` must not throw; the job's owner carries errors in
// its context.
struct Job {
    void (*run)(void* context, uint64_t argument) = nullptr;
    void* context = nullptr;
    uint64_t argument = 0;
    // The time that a simulated executor charges for it; 0 lets it draw a seeded duration.
    Nanos simulated_ns = 0;
};

// Something that has a thread of its own and blocks in the kernel rather than in the executor, such
// as an io_uring. A real executor calls run_once(kForever) in a loop on the service's thread. The
// simulated one calls run_once(now) on its one thread whenever virtual time reaches next_event().
class Service {
public:
    virtual ~Service() = default;
    virtual std::string_view name() const = 0;
    // Takes what was submitted, moves it on, delivers what finished. May block until `until`, or
    // until interrupt().
    virtual void run_once(Nanos until) = 0;
    // Any thread: makes a blocked run_once() return soon, or the next one not block.
    virtual void interrupt() = 0;
    // Virtual time of the next thing run_once() would do, kForever if none. Simulation only.
    virtual Nanos next_event() const { return kForever; }
};

using LaneId = uint32_t;

// Owns every thread. One thread, "the step thread", calls add_lane, host, post and wait; jobs run
// on lanes, in order within a lane.
class Executor {
public:
    virtual ~Executor() = default;
    // At start-up only. `lane_depth` jobs can be posted and not yet finished.
    virtual LaneId add_lane(std::string name, int lane_depth = 1024) = 0;
    virtual void host(Service& service) = 0;
    virtual void retire(Service& service) = 0;  // returns when run_once() will not be called again
    // Never allocates; a full lane is a bug of the caller, who bounds what it posts.
    virtual void post(LaneId lane, Job job) = 0;
    // Step thread: sleeps until `until`, or until wake() is called. A wake() since the last wait
    // returned counts. The simulated executor runs the next event instead of sleeping. When there
    // is none before kForever it aborts with "deadlock": nothing could ever wake it.
    virtual void wait(Nanos until) = 0;
    virtual void wake() noexcept = 0;  // any thread
    virtual Nanos now() const noexcept = 0;
    virtual bool simulated() const noexcept { return false; }
};

std::unique_ptr<Executor> make_thread_executor();
// One thread, virtual time: the same seed runs the same events in the same order.
std::unique_ptr<Executor> make_simulated_executor(uint64_t seed);

}  // namespace ferry
