// One ring. It takes operations from the step thread and splits them into transfers. Its own thread
// drives a backend until every byte has moved, and hands the operations back.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "backend.h"
#include "errors.h"
#include "ferry/aio.h"
#include "spsc.h"

namespace ferry::aio {

// Whose an operation is. The volume's own (layout, flush, discard, publication) are not cancelled;
// those of its own operations, for which it blocks, are not returned by poll() either.
enum class Owner : uint8_t { caller, volume, publication };

// An operation with its place in a file. Without an operation it is the order "cancel everything
// that came before this and has not reached the backend".
struct Request {
    Operation* operation = nullptr;
    Verb verb = Verb::read;
    Owner owner = Owner::caller;
    uint16_t file = 0;
    int64_t file_offset = 0;  // where the operation's first byte lies
    int64_t size_bytes = 0;
};

// An operation that is taken and has yet to reach a queue.
inline void begin(Operation& operation, Nanos now) noexcept {
    operation.state = State::queued;
    operation.done_bytes = 0;
    operation.error = 0;
    operation.submitted_ns = now;
    operation.finished_ns = 0;
}

struct QueueOptions {
    std::string name;
    int path = 0, ring = 0;
    int depth = 32;
    int operations_max = 256;
    int64_t block_bytes = kMiB;
    bool whole_writes = false;  // not in blocks
    int64_t alignment = 4096;
    size_t slots = 0;          // slot ids are below this
    int files = 1;             // file numbers are
    std::vector<int> cores{};  // cores its thread may run on; empty: any
    Tracer tracer{};
};

struct QueueCounters {
    int64_t bytes_read = 0, bytes_written = 0, bytes_retried = 0, bytes_overhead = 0;
    int64_t reads = 0, writes = 0, retries = 0, errors = 0;
    double read_bytes_per_s = 0, write_bytes_per_s = 0, bytes_per_s = 0;
};

// The rate sustained while the ring was kept busy. Owned by the I/O thread, read by any.
class Speedometer {
public:
    void add(Verb verb, int64_t bytes) noexcept {
        (verb == Verb::read ? read_ : written_) += bytes;
    }
    // `busy_ns` passed since the last call, in which the bytes added moved. Only with the ring at
    // least half full, or 2 MiB under way; otherwise skip(): it would measure the caller.
    void pass(Nanos busy_ns) noexcept;
    void skip() noexcept { read_ = written_ = 0; }
    void report(QueueCounters& counters) const noexcept;

private:
    int64_t read_ = 0, written_ = 0;                // since the last call
    int64_t window_read_ = 0, window_written_ = 0;  // in this window
    Nanos window_ns_ = 0;
    std::atomic<double> read_rate_ = 0, write_rate_ = 0, rate_ = 0;
};

class Queue final : public Service {
public:
    Queue(QueueOptions options, std::unique_ptr<Backend> backend, Executor& executor);
    ~Queue() override;

    // Step thread. Neither blocks nor allocates.
    void submit(const Request& request) noexcept;
    void cancel() noexcept;      // operations that have not reached the backend
    Operation* poll() noexcept;  // the next finished operation but own operations'
    int64_t finished() const noexcept { return finished_.load(); }  // both kinds, polled or not
    QueueCounters counters() const noexcept;
    std::string_view backend_name() const noexcept { return backend_->name(); }

    std::string_view name() const override { return options_.name; }
    void run_once(Nanos until) override;
    void interrupt() override { backend_->wake(); }
    Nanos next_event() const override;

private:
    static constexpr uint32_t kNone = ~uint32_t{0};
    static constexpr int kLists = 3;

    // An unfinished operation.
    struct Entry {
        Request request;
        Priority priority = Priority::normal;
        int64_t issued_bytes = 0;
        int flights = 0;   // transfers of it that are not landed
        int error = 0;     // the first one; nothing more is issued, the buffer stays until all land
        int blockers = 0;  // older conflicting operations
        uint32_t older = kNone, newer = kNone;    // chain of the same slot, by age
        uint32_t previous = kNone, next = kNone;  // ready list
        bool listed = false;
    };
    // A block of an entry on its way, kept over resumes and retries.
    struct Flight {
        uint32_t entry = kNone;
        int64_t offset = 0;  // in the operation
        int64_t size_bytes = 0, done_bytes = 0;
        int attempts = 0;  // since the last progress
        Nanos retry_at = 0;
        Nanos sent = 0;  // the last time
        int64_t left() const noexcept { return size_bytes - done_bytes; }
    };
    struct List {
        uint32_t first = kNone, last = kNone;
    };

    void stay_near_the_drive();
    // Intake.
    void take_requests();
    void enter(const Request& request);
    bool link_to_slot(uint32_t index);
    void cancel_unissued();
    bool fails_like_before(uint32_t index);
    bool conflict(const Entry& a, const Entry& b) const noexcept;
    void list(uint32_t index);
    void unlist(uint32_t index);
    void raise_older(uint32_t index, Priority priority);
    // Towards the backend.
    void issue();
    void rouse();
    bool start_flight();
    void send(uint32_t id);
    Nanos sleep_until(Nanos until);
    // Back from it.
    void complete(const Completion& completion);
    void trace(const Completion& completion) const;
    int64_t file_end(uint32_t id) const noexcept;  // where its transfer ends in the file
    void failed(uint32_t id, int error);
    void moved(uint32_t id, int64_t bytes);
    void rest(uint32_t id, int error_when_spent);
    void abandon(uint32_t id, int error);
    void land(uint32_t id);
    void finish(uint32_t index, State state);
    void tell();

    const QueueOptions options_;
    std::unique_ptr<Backend> backend_;
    Executor& executor_;

    Spsc<Request> inbox_;
    Spsc<Operation*> outbox_;
    bool cancellable_ = false;  // step thread: something was submitted since the last cancel()
    std::atomic<bool> sleeping_ = false;
    std::atomic<int64_t> finished_ = 0;

    // Everything below belongs to the I/O thread.
    bool placed_ = false;
    std::vector<Entry> entries_;
    std::vector<uint32_t> free_entries_;
    std::vector<uint32_t> newest_of_slot_;
    std::vector<int> flush_errors_;  // the errno with which a flush of each file failed
    List ready_[kLists];
    std::vector<Flight> flights_;
    std::vector<uint32_t> free_flights_;
    std::vector<uint32_t> resting_;   // flights waiting for their retry time
    std::vector<Transfer> outgoing_;  // not yet taken by the backend
    std::vector<Completion> completions_;
    int in_backend_ = 0;
    int64_t bytes_in_backend_ = 0;
    Nanos now_ = 0;
    Nanos measured_at_ = 0;   // the end of the last round's wait
    bool busy_ = false;       // since then, there was enough under way to measure the device
    bool delivered_ = false;  // something finished that the step thread was not told of
    bool pressing_ = false;   // one of it was urgent or large
    Nanos told_at_ = 0;

    struct {
        std::atomic<int64_t> bytes_read = 0, bytes_written = 0, bytes_retried = 0,
                             bytes_overhead = 0;
        std::atomic<int64_t> reads = 0, writes = 0, retries = 0, errors = 0;
    } counts_;
    Speedometer speed_;
};

}  // namespace ferry::aio
