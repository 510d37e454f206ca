// A schedule is data: lanes of tasks, each with the counters of other lanes that it
// waits for. The store replays it, and predict() says how long that takes.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "swap/objects.h"

namespace ferry::swap {

// Tasks of a lane start in order: kernels, copies to the device and back, updates by the team,
// checks, storage, exchanges of ranks.
enum class Lane : uint8_t { compute, h2d, d2h, team, check, read, write, comm };
std::string_view name_of(Lane lane);

constexpr int kLanes = 8;
// The lanes of a run: the last one is idle where there is one rank.
constexpr size_t lanes_of(int ranks) {
    return static_cast<size_t>(ranks > 1 ? kLanes : kLanes - 1);
}

// Tasks complete in order within a lane, as counted: a counter of n means tasks 0..n-1 are done.
struct Wait {
    Lane lane = Lane::compute;
    uint32_t index = 0;  // the task that must be done: its place in its lane
};

// Where a task's operand lies; resolved to an address when the task is dispatched.
struct OperandPlace {
    enum class Kind : uint8_t { none, device, host, current, fresh };
    Kind kind = Kind::none;
    ObjectId object = kNoObject;  // current, fresh: this object's version in memory
    int64_t offset = 0;           // bytes, in the arena or in the object
};

enum class Verb : uint8_t {
    kernel,    // compute, team, comm: the owner's work
    copy,      // h2d, d2h: places[0] -> places[1]
    read,      // object on NVMe -> places[0]
    write,     // places[0] -> object on NVMe; a versioned object gets a fresh slot
    seal,      // check: checksums of places[0], about to be written
    verify,    // check: places[0], just read, against the checksums
    commit,    // write: the pending version becomes current, the old one is free
    rollback,  // write: the pending version is free
};

const char* name_of(Verb verb);

constexpr int kPlaces = 10;
struct Task {
    Verb verb = Verb::kernel;
    Lane lane = Lane::compute;
    uint8_t op = 0;        // kernel: which, the owner's enum
    uint8_t flags = 0;     // kernel: what the op says they are
    bool commits = false;  // write: becomes current when its bytes are on the device
    int32_t layer = -1;    // -1: of none
    int32_t item = -1;     // micro-batch or chunk, by op or object; -1: of none
    ObjectId object = kNoObject;
    int64_t bytes = 0;  // moved; by a kernel read and written
    std::array<OperandPlace, kPlaces> places{};
    uint32_t index = 0;  // in its lane
    uint32_t first_wait = 0, waits = 0;
    uint32_t first_entry = 0, entries = 0;
};

// A use of a resource, which is a planned buffer or an object, that no earlier task of this
// schedule orders. The replay makes it wait for what earlier schedules left in flight.
struct EntryUse {
    uint32_t resource = 0;
    bool writes = false;
};

// Highest task index by lane, -1 none.
struct Counters {
    std::array<int64_t, kLanes> last{-1, -1, -1, -1, -1, -1, -1, -1};
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
    std::vector<EntryUse> entries{};
    std::vector<LastUse> last_uses{};
    // The first so many tasks of its write lane. Among them is all that the step before still has
    // to write.
    int64_t committed_writes = 0;
    Wait outcome{};  // when this is done the step's outcome is known
    bool has_outcome = false;
};
// Aborts unless every wait points to a task that comes earlier in program order: such a schedule
// cannot deadlock.
void prove_acyclic(const Schedule& schedule);

// ---------------------------------------------------------------- prediction

// Resources that several lanes use at once.
enum class Shared : uint8_t { cores, disk, dram };
constexpr int kShared = 3;
// The seconds that a task takes alone, and the share of each shared resource that it needs
// meanwhile. 1 is all of it.
struct Cost {
    double seconds = 0;
    std::array<double, kShared> part{};
};
using CostModel = std::function<Cost(const Task&)>;

struct Timeline {
    struct Slice {
        double begin_s = 0, end_s = 0;  // since the outcome of the step before
    };
    std::vector<Slice> tasks{};  // the schedule's, in program order
    double step_seconds = 0;     // from outcome to outcome once steps follow each other
    std::array<double, kLanes> busy_seconds{};
};
// Replays `first` and then `steady` again and again, as the store does but without the work.
// Running tasks that need more of a resource than there is slow down alike.
Timeline predict(const Schedule& first, const Schedule& steady, uint32_t resources,
                 const CostModel& cost);

// One rank of several whose exchanges wait for each other.
struct RankSteps {
    const Schedule* first = nullptr;
    const Schedule* steady = nullptr;
    uint32_t resources = 0;
    CostModel cost{};
};
// The point where a rank's exchange meets those of others. The n-th exchange at a point begins when
// all ranks of the point have come to their n-th. kAlone: it waits for nobody.
constexpr int kAlone = -1;
using Meets = std::function<int(size_t rank, const Task& exchange)>;
// The same for several ranks. `points` lists the ranks that meet at each point. A rank's exchanges
// at one point go in their order, and all its exchanges end in the order of the lane.
std::vector<Timeline> predict_together(std::span<const RankSteps> ranks,
                                       std::span<const std::vector<size_t>> points,
                                       const Meets& meets);

}  // namespace ferry::swap
