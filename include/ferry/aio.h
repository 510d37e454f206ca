// Asynchronous file I/O in fixed slots of preallocated files. Every byte count is checked, and
// everything is bounded and allocated at start. aio/README.md shows the way from submit() to the
// kernel.
//
// Threads: one owner thread (the "step thread") calls everything below except where a line says
// otherwise. Each ring has its own thread, run by the Executor.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "ferry/aio_kinds.h"
#include "ferry/error.h"
#include "ferry/executor.h"
#include "ferry/units.h"

namespace ferry::aio {

constexpr int64_t kHeaderBytes = 8192;  // beside a path's slots, of its size_bytes: two copies

// How one directory (or raw block device) is used.
struct PathOptions {
    std::string path{};
    int64_t size_bytes = 0;    // at most this much of it
    bool raw_device = false;   // path names a block device whose contents may be destroyed
    int files = 0;             // that hold the slots; 0: as the probe finds best
    double endurance_tbw = 0;  // drive's rated terabytes written; 0: unknown
    double bytes_per_s = 0;    // sustained; 0 at one of several paths: all are measured at open
    std::vector<int> cores{};  // processing units that its rings' threads run on; empty: any
};

// A family of equally large slots. Slots of different classes never overlap.
struct SlotClass {
    std::string name{};
    int64_t slot_bytes = 0;  // rounded up to the volume's alignment
    int64_t slots = 0;       // over all paths
};

enum class Verb : uint8_t { read, write, flush, discard };

// One transfer that came back from the kernel; an operation is one or more of them.
struct TransferTrace {
    Verb verb = Verb::read;
    int path = 0, ring = 0, file = 0;
    uint64_t tag = 0;                // of its operation; 0: the volume's own
    int64_t offset = 0;              // in the file
    int64_t bytes = 0;               // moved
    int error = 0;                   // errno
    Nanos start_ns = 0, end_ns = 0;  // handed to the kernel, seen to be back
};

// Called on a ring's thread for each of its transfers: must be quick, and not call the volume.
struct Tracer {
    void (*transfer)(void* context, const TransferTrace& trace) = nullptr;
    void* context = nullptr;
};

struct VolumeOptions {
    std::vector<PathOptions> paths{};
    std::vector<SlotClass> classes{};
    BackendKind backend = BackendKind::automatic;
    int64_t block_bytes = 1 * kMiB;  // a transfer at most, but for writes that workers copy (tmpfs)
    int queue_depth = 32;            // transfers in flight, a ring
    int operations_max = 256;        // submitted and not yet polled
    int rings = 1;                   // a path
    bool direct = true;              // O_DIRECT; falls back to buffered where refused, and says so
    bool sqpoll = false, iopoll = false;  // used where the probe shows that they work
    Leftover leftover = Leftover::remove;
    uint64_t run_id = 0;  // hash of the numerics record: tells whose leftovers they are
    // Writes every slot once, so that later writes change no metadata of the file system: in
    // open(), or by finish_layout().
    bool write_once = true, lays_out_later = false;
    // Memory to register with the kernel: only I/O slabs, on huge pages (aio/README.md).
    std::vector<std::span<std::byte>> registered{};
    // With several paths each gets so many more slots than its share, as far as its size allows. So
    // the shares can follow the speeds. No more than SlotClass::slots are ever in use.
    double slack = 0.25;
    // Room for publish(): with a record published the files outlive volume and process. 0: never.
    int64_t record_bytes = 0;
    Tracer tracer{};
};

using SlotId = uint32_t;
constexpr SlotId kNoSlot = ~SlotId{0};
enum class Kind : uint8_t { read, write };
enum class Priority : uint8_t { urgent, normal, background };  // urgent overtakes write-back
enum class State : uint8_t { idle, queued, done, failed, cancelled };

// Owned by the caller, who leaves it and its buffer alone from submit() until poll() returned it.
struct Operation {
    Kind kind = Kind::read;
    Priority priority = Priority::normal;
    SlotId slot = kNoSlot;
    int64_t offset = 0;             // in the slot; multiple of the volume's alignment
    std::span<std::byte> buffer{};  // address and size multiples of the alignment
    uint64_t tag = 0;               // the caller's
    State state = State::idle;      // below: written by the volume
    int64_t done_bytes = 0;
    int error = 0;  // errno, when failed
    Nanos submitted_ns = 0, finished_ns = 0;
};

struct PathCounters {
    std::string path{};
    int64_t bytes_read = 0, bytes_written = 0;  // by operations
    int64_t bytes_retried = 0;                  // transferred again after a short count
    int64_t bytes_overhead = 0;  // written besides: probes, headers, layout, what was repeated
    int64_t reads = 0, writes = 0, retries = 0, errors = 0;
    double read_bytes_per_s = 0, write_bytes_per_s = 0;  // sustained estimate
    double endurance_used = 0;  // all that was written, of endurance_tbw; 0: unknown
};

// After open() only what returns a string or a vector, and errors, allocate memory.
class Volume {
public:
    // Locks, creates or takes over the files, lays the classes out. Blocks; throws Error (io or
    // does_not_fit). `executor` must outlive the volume.
    static std::unique_ptr<Volume> open(VolumeOptions options, Executor& executor);
    // Cancels what is queued, waits for the rest and unlocks. Removes the files unless a record was
    // published. Operations that were not polled must live until then.
    virtual ~Volume() = default;

    // Free slots are handed out over the paths in proportion to their speed; O(1).
    virtual SlotId allocate(int slot_class) noexcept = 0;  // kNoSlot: none free
    virtual void free(SlotId slot) noexcept = 0;
    virtual void discard_free_slots() = 0;  // gives the blocks of free slots back to the device
    virtual void finish_layout() = 0;       // spares what was written; nothing is under way; throws

    // Enqueues; never blocks, never allocates. Conflicting operations on a slot keep their order;
    // nothing else does. False, and nothing happened: operations_max are under way, poll() first.
    [[nodiscard]] virtual bool try_submit(Operation& operation) noexcept = 0;
    // For callers that keep count themselves: to have more than operations_max under way is a bug.
    void submit(Operation& operation) noexcept {
        FERRY_CHECK(try_submit(operation), "more operations than operations_max");
    }
    // The next finished operation, or nullptr. The executor's wake() was called for each.
    virtual Operation* poll() noexcept = 0;
    // Operations that have not reached the kernel become `cancelled`; poll() still returns every
    // one.
    virtual void cancel_queued() noexcept = 0;
    virtual int in_flight() const noexcept = 0;
    // Blocks until all written so far is on stable storage; throws Error, on that file for good.
    virtual void flush() = 0;
    // Writes the last committed step into the headers. A kill does not lose it, a power failure
    // may.
    virtual void note_step(int64_t step) noexcept = 0;
    virtual int64_t noted_step() const noexcept = 0;  // at first a resumed run's; -1: none
    // The run ends because storage failed. Where a step was noted, the headers stay and say what is
    // lost.
    virtual void note_lost() noexcept = 0;

    // ---- with record_bytes: a record of what the slots hold, in two copies
    virtual std::span<std::byte> record() noexcept = 0;  // to fill while none is published
    // Flushes on every path what was written and polled until now. Then the first `bytes` of
    // record() replace the older copy, and are flushed. It never blocks: poll() moves it on.
    virtual void publish(int64_t bytes) noexcept = 0;
    // False: it is under way. Throws Error where it failed: the copy before stands.
    virtual bool published() = 0;
    // A file that was removed while the volume uses it. The record is gone with it. Empty: none
    // was.
    virtual std::string missing() const = 0;
    // The n-th record that was found, with Leftover::resume, until publish(). Whole records come
    // first, and n = 0 is the newest. Behind them it throws io for each record that could not be
    // read, which does not prove that it is damaged. Empty: there are no more.
    virtual std::span<const std::byte> found_record(size_t n) const = 0;
    // Goes on from this record. Its copy is the last to be overwritten.
    virtual void resume_from(size_t n) noexcept = 0;
    // Takes exactly these slots. False: they cannot be taken.
    [[nodiscard]] virtual bool take(int slot_class, std::span<const SlotId> slots) = 0;

    virtual int64_t alignment() const noexcept = 0;
    virtual int64_t slot_bytes(int slot_class) const noexcept = 0;
    virtual int path_of(SlotId slot) const noexcept = 0;
    // "/mnt/a/ferry.slots0 at 1048576": for messages.
    virtual std::string describe(SlotId slot) const = 0;
    virtual std::string_view backend_name() const noexcept = 0;
    virtual bool direct(int path) const noexcept = 0;  // obtained; false: through the page cache
    virtual std::vector<PathCounters> counters() const = 0;
    // Bytes of all slots that may be in use at once, and of the record's copies. Then those of the
    // most slots that ever were in use.
    virtual int64_t reserved_bytes() const noexcept = 0;
    virtual int64_t peak_bytes() const noexcept = 0;
};

// The Error of a failed operation: path, offset, size, errno and what to do.
Error to_error(const Volume& volume, const Operation& operation);
// The counters as lines of a run's summary: one a path, and a total for several.
std::string describe(std::span<const PathCounters> paths, std::string_view indent = {});

// Checksums of a slot's contents, one for each piece of 256 KiB, keyed by version. They are kept in
// memory, apart from the data. So the bytes that a lost or misdirected write leaves do not match.
constexpr int64_t kPieceBytes = 256 * kKiB;
constexpr int64_t pieces_of(int64_t bytes) { return ceil_div(bytes, kPieceBytes); }

// Any thread; pure functions over the bytes. `sums` has pieces_of(bytes.size()) elements.
void seal(std::span<const std::byte> bytes, uint64_t version, std::span<uint64_t> sums) noexcept;
// Index of the first piece that does not match, or -1.
int64_t verify(std::span<const std::byte> bytes, uint64_t version,
               std::span<const uint64_t> sums) noexcept;

}  // namespace ferry::aio
