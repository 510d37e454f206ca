// The tiered store: where every piece of state lives, the schedule that moves it, and the replay of
// that schedule. A schedule is data (design.md 1.1): lanes of tasks, each with the counters of
// other lanes that it waits for; replaying it allocates nothing and cannot deadlock.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "ferry/aio.h"
#include "ferry/base.h"
#include "ferry/device.h"
#include "ferry/trace.h"

namespace ferry::swap {

enum class Tier : uint8_t { device, host, nvme };
std::string_view name_of(Tier tier);

// ---------------------------------------------------------------- objects

// A piece of state with a home: a chunk's p, m, v; its weights; its gradient; a block input.
using ObjectId = uint32_t;
constexpr ObjectId kNoObject = ~ObjectId{0};
struct Object {
    Tier home = Tier::host;
    int64_t bytes = 0;
    int64_t offset = 0;   // of a fixed home in the device or host arena
    int slot_class = -1;  // NVMe: the volume's; host: -1 is a fixed home, else versioned host slots
    bool versioned = false;  // written copy-on-write; a version becomes current when it is settled
};

// Equally large host slots for versioned objects: a run of the host arena.
struct HostSlots {
    int64_t offset = 0, slot_bytes = 0, slots = 0;
};

// ---------------------------------------------------------------- schedule

enum class Lane : uint8_t { compute, h2d, d2h, team, check, read, write };
constexpr int kLanes = 7;
std::string_view name_of(Lane lane);

// Tasks complete in order within a lane, as counted: a counter of n means tasks 0..n-1 are done.
struct Wait {
    Lane lane = Lane::compute;
    uint32_t index = 0;  // of the task that must be done, in its lane of this schedule
};

// Where a task's operand lies; resolved to an address when the task is dispatched.
struct Place {
    enum class Kind : uint8_t { none, device, host, current, fresh };
    Kind kind = Kind::none;
    ObjectId object = kNoObject;  // current, fresh: this object's version in memory
    int64_t offset = 0;           // bytes, in the arena or in the object
};

enum class Verb : uint8_t {
    kernel,    // compute, team: the owner's work
    copy,      // h2d, d2h: places[0] -> places[1]
    read,      // object on NVMe -> places[0]
    write,     // places[0] -> object on NVMe; a versioned object gets a fresh slot
    seal,      // check: checksums of places[0], about to be written
    verify,    // check: places[0], just read, against the checksums
    commit,    // write: the pending version becomes current, the old one is free
    rollback,  // write: the pending version is free
};

const char* name_of(Verb verb);

constexpr int kPlaces = 9;
struct Task {
    Verb verb = Verb::kernel;
    Lane lane = Lane::compute;
    uint8_t op = 0;        // kernel: which, the owner's enum
    bool settled = false;  // write: becomes current when its bytes are on the device
    int32_t layer = 0;
    int32_t item = 0;  // micro-batch or chunk, by op
    ObjectId object = kNoObject;
    int64_t bytes = 0;
    std::array<Place, kPlaces> places{};
    uint32_t index = 0;  // in its lane
    uint32_t first_wait = 0, waits = 0;
    uint32_t first_entry = 0, entries = 0;
};

// A use of a resource (a planned buffer or an object) that nothing earlier in this schedule orders:
// the replay makes it wait for what the schedules before left in flight.
struct Entry {
    uint32_t resource = 0;
    bool writes = false;
};

// Highest task index by lane, -1 none.
struct Counters {
    std::array<int64_t, kLanes> last{-1, -1, -1, -1, -1, -1, -1};
    void raise(Lane lane, int64_t index) {
        int64_t& mine = last[static_cast<size_t>(lane)];
        if (index > mine) mine = index;
    }
    void raise(const Counters& other) {
        for (size_t lane = 0; lane < kLanes; ++lane) {
            if (other.last[lane] > last[lane]) last[lane] = other.last[lane];
        }
    }
};
// How a schedule leaves a resource: who wrote it last and who has read it since.
struct LastUse {
    uint32_t resource = 0;
    bool written = false;  // false: read only, earlier writers still count
    Counters writers{}, readers{};
};

struct Schedule {
    std::string name{};
    std::vector<Task> tasks{};  // in program order: every wait points to an earlier task
    std::array<std::vector<uint32_t>, kLanes> lanes{};
    std::vector<Wait> waits{};
    std::vector<Entry> entries{};
    std::vector<LastUse> last_uses{};
    Wait verdict{};  // when this is done the step can be settled
    bool has_verdict = false;
};
// Aborts unless every wait points to a task that comes earlier in program order: such a schedule
// cannot deadlock.
void prove_acyclic(const Schedule& schedule);

// ---------------------------------------------------------------- prediction

// What several lanes draw on at once.
enum class Shared : uint8_t { cores, disk, dram };
constexpr int kShared = 3;
// What a task takes alone, and the part of each shared resource that it needs meanwhile (1: all).
struct Cost {
    double seconds = 0;
    std::array<double, kShared> part{};
};
using CostModel = std::function<Cost(const Task&)>;

struct Timeline {
    struct Slice {
        double begin_s = 0, end_s = 0;  // since the step before was settled
    };
    std::vector<Slice> tasks{};  // the schedule's, in program order
    double step_seconds = 0;     // from verdict to verdict once steps follow each other
    std::array<double, kLanes> busy_seconds{};
};
// Replays `first` and then `steady` again and again, as the store does but without the work.
// Running tasks that need more of a resource than there is slow down alike.
Timeline predict(const Schedule& first, const Schedule& steady, uint32_t resources,
                 const CostModel& cost);

// ---------------------------------------------------------------- store and replay

class Store;

// What a kernel task is run with. `at` are the addresses of its places.
struct Call {
    const Task* task = nullptr;
    int64_t step = 0;
    std::array<std::byte*, kPlaces> at{};
    Store* store = nullptr;
};
// The owner's work. Must not throw: a failure goes into Store::fail.
class Kernels {
public:
    virtual ~Kernels() = default;
    virtual void run(const Call& call) noexcept = 0;  // on the lane's thread
    // "step 12, block 3, backward": for an error's `where`.
    virtual std::string describe(const Call& call) const = 0;
};

struct StoreOptions {
    std::vector<Object> objects{};
    HostSlots host_slots{};
    uint32_t resources = 0;  // planned buffers and objects, as the recorder numbered them
    bool verify = true;
    std::span<std::byte> host_arena{};
    // Optional: a slice for each task on its lane's row, from when it could start to when it was
    // seen done. Kernel tasks are named by their op, everything else by its verb.
    trace::Recording* recording = nullptr;
    std::array<trace::RowId, kLanes> rows{};
    const char* (*kernel_name)(uint8_t op) = nullptr;
};

// What moved over each link since the last reset, and how long each lane was busy.
struct LaneReport {
    int64_t bytes = 0, tasks = 0;
    Nanos busy_ns = 0;
};

// Owns where objects are; replays schedules. One thread (the step thread) calls everything, but for
// seal, verify and fail.
class Store {
public:
    // `volume` may be null when no object lives on NVMe. All references must outlive the store.
    static std::unique_ptr<Store> make(StoreOptions options, Executor& executor, Device& device,
                                       aio::Volume* volume, Kernels& kernels);
    virtual ~Store() = default;  // waits for what is in flight

    // The schedule's tasks follow everything appended before, lane by lane. It must stay alive
    // until drained. `step` is passed to its kernels. At most 4 schedules at a time.
    virtual void append(const Schedule& schedule, int64_t step) = 0;
    // Replays until the verdict of the schedule appended last is known; throws what went wrong.
    virtual void run_to_verdict() = 0;
    virtual void drain() = 0;  // replays everything appended

    // Blocking access to an object's current version; only when drained. `bytes` as large as it.
    virtual void put(ObjectId object, std::span<std::byte> bytes) = 0;
    virtual void get(ObjectId object, std::span<std::byte> bytes) = 0;

    // Any thread, from a kernel: checksums of a version about to be written (`pending` for
    // versioned objects), and of one just read. verify() calls fail() and returns false on a
    // mismatch.
    virtual void seal(ObjectId object, std::span<const std::byte> bytes) noexcept = 0;
    virtual bool verify(ObjectId object, std::span<const std::byte> bytes) noexcept = 0;
    virtual void fail(Error error) noexcept = 0;  // the first one is thrown by the step thread

    virtual std::array<LaneReport, kLanes> report() const = 0;
    virtual void reset_report() = 0;
};

}  // namespace ferry::swap
