// The tiered store: where every object lives, and the replay of the schedules that move it
// (schedule.h). Replaying allocates nothing and cannot deadlock.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "ferry/aio.h"
#include "ferry/device.h"
#include "ferry/error.h"
#include "ferry/executor.h"
#include "swap/objects.h"
#include "swap/schedule.h"
#include "trace/trace.h"

namespace ferry::swap {

class Store;

// The call of a kernel task. `at` are the addresses of its places.
struct Call {
    const Task* task = nullptr;
    int64_t sequence = 0;  // as the schedule was appended with
    std::array<std::byte*, kPlaces> at{};
    Store* store = nullptr;
};
// The owner's work. Must not throw: a failure goes into Store::fail.
class Kernels {
public:
    virtual ~Kernels() = default;
    virtual void run(const Call& call) noexcept = 0;  // on a thread of the lane's
    // Whether this task of the team lane may run while its neighbours run. It must be true of both:
    // the lane alone orders the tasks of a lane. Only the step thread asks, when it dispatches the
    // task.
    virtual bool runs_beside(const Task&) const { return false; }
    // Whether this exchange is dispatched before the kernels that were recorded behind it. It must
    // be where their launch may wait for ranks that may wait for the exchange.
    virtual bool leaves_first(const Task& /*exchange*/) const { return false; }
    // "step 12, block 3, backward": for an error's `where`.
    virtual std::string describe(const Call& call) const = 0;
};

// The comm lane's work: what the ranks exchange. It starts and ends in the lane's order, as on a
// device's stream. Only the step thread calls.
class Collectives {
public:
    virtual ~Collectives() = default;
    virtual void start(const Call& call) = 0;  // enqueues and returns
    // After everything started so far: ++counter, then the executor's wake(). Also when that
    // failed: check() then throws.
    virtual void signal(std::atomic<uint64_t>& counter) = 0;
    virtual void check() = 0;
};

struct StoreOptions {
    std::vector<Object> objects{};
    std::vector<HostSlots> host_slots{};
    uint32_t resources = 0;  // planned buffers and objects, as the recorder numbered them
    bool verify = true;
    std::span<std::byte> host_arena{};
    // Optional: gets a slice for each task on its lane's row. It begins when the task could start
    // and ends when the task was seen done. Its name is the kernel's op, or the task's verb.
    trace::Recording* recording = nullptr;
    std::array<trace::RowId, kLanes> rows{};
    const char* (*kernel_name)(uint8_t op) = nullptr;
    Collectives* collectives = nullptr;  // null: no schedule has a comm lane
    Parallel parallel{};                 // optional: hashes
};

// Bytes moved by each lane since the last reset, and how long it was busy.
struct LaneReport {
    int64_t bytes = 0, tasks = 0;
    Nanos busy_ns = 0;
    Nanos exposed_ns = 0;  // the part of it in which the compute lane had nothing
};

// Knows where objects are, and replays schedules. The step thread calls everything but seal, verify
// and fail.
class Store {
public:
    // `volume` may be null when no object lives on NVMe. All references must outlive the store.
    static std::unique_ptr<Store> make(StoreOptions options, Executor& executor, Device& device,
                                       aio::Volume* volume, Kernels& kernels);
    ~Store();  // waits for what is in flight
    Store(const Store&) = delete;
    Store& operator=(const Store&) = delete;

    // The schedule's tasks follow everything appended before, lane by lane. It must stay alive
    // until drained. `sequence` is passed to its kernels, which tell schedules apart by it; `step`
    // is what the recording shows. At most 4 schedules at a time.
    void append(const Schedule& schedule, int64_t sequence, int64_t step);
    // Replays until the outcome of the schedule appended last is known; throws what went wrong.
    void run_to_outcome();
    void drain();  // replays everything appended

    // Blocking access to an object's current version; only when drained. `bytes` as large as it.
    void put(ObjectId object, std::span<std::byte> bytes);
    void get(ObjectId object, std::span<std::byte> bytes);
    // Begins a put(). Until end_puts() has waited for it, `bytes` must not change, and the store
    // may only be asked for further puts. end_puts() waits for the oldest ones, in their order,
    // until no more than `under_way` are left. It throws what went wrong with them.
    void begin_put(ObjectId object, std::span<std::byte> bytes);
    void end_puts(int64_t under_way);
    // The object's current version in host memory, to be read and written in place. Empty: it lies
    // elsewhere.
    std::span<std::byte> in_host(ObjectId object) noexcept;

    // Makes the step before the newest schedule durable, once its updates are committed and written
    // (Schedule::committed_writes). The volume publishes a map of the current versions of all
    // versioned objects on NVMe, and `state`: what the owner knows of that step. Returns at once.
    // run_to_outcome() then waits until the versions are taken down; `state` must live until then.
    // drain() waits until they are durable. Slots that the last durable map names are not written
    // until the next one is durable. Needs `verify`, twice the slots and a volume with record_bytes
    // for map and state.
    void publish(std::span<const std::byte> state);
    // Returns once what was to be published is durable.
    void wait_published();
    // For a volume opened to resume. Takes over the versions of its n-th newest record and returns
    // the owner's `state`; none: there is no such record. get() proves the contents. After one that
    // is wrong the next restore() starts afresh. Throws io where it cannot be taken over. These,
    // and puts, throw TransferFailed where nothing is known to be wrong.
    std::optional<std::span<const std::byte>> restore(size_t n);

    // Any thread, from a kernel. seal() takes the checksums of a version about to be written
    // (`pending` for versioned objects). verify() compares those of one just read; on a mismatch it
    // calls fail() and returns false.
    void seal(ObjectId object, std::span<const std::byte> bytes) noexcept;
    bool verify(ObjectId object, std::span<const std::byte> bytes) noexcept;
    void fail(Error error) noexcept;  // the first one is thrown by the step thread
    // Step thread, after a failure: whether bytes were wrong or could not be read. `in_published`:
    // some of them are part of what was published last; `elsewhere`: none of them is.
    enum class Wrong : uint8_t { none, elsewhere, in_published };
    Wrong what_was_wrong() const noexcept;

    std::array<LaneReport, kLanes> report() const;
    void reset_report();

private:
    class Replay;
    Store(StoreOptions options, Executor& executor, Device& device, aio::Volume* volume,
          Kernels& kernels);
    const std::unique_ptr<Replay> replay_;
};

}  // namespace ferry::swap
