#include "queue.h"

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "base/log.h"
#include "base/threads.h"

namespace ferry::aio {
namespace {

// A transfer that makes no progress is asked for this often, at first at once and then ever more
// slowly: rests of 1.25 s in all.
constexpr int kAttemptsMax = 16;
constexpr int kAttemptsAtOnce = 4;
constexpr Nanos kRestFirst = 1'000'000, kRestMax = 250'000'000;
// More under way than any device needs to be at its full speed: 10 GB/s for 200 microseconds.
constexpr int64_t kSaturatingBytes = 2 * kMiB;
// Small operations, thousands of which a second would wake the step thread for each, wait for each
// other this long.
constexpr int64_t kSmallBytes = 64 * kKiB;
constexpr Nanos kTellEvery = 50'000;
constexpr int64_t kWholeMax = kGiB;       // the kernel moves less than 2 GiB at once
constexpr Nanos kStall = 10'000'000'000;  // a transfer that took longer is worth a line

// Only the I/O thread writes a counter, so it needs no atomic addition.
void bump(std::atomic<int64_t>& counter, int64_t by) noexcept {
    counter.store(counter.load(std::memory_order_relaxed) + by, std::memory_order_relaxed);
}

size_t index_of(Priority priority) { return static_cast<size_t>(priority); }

}  // namespace

// ---------------------------------------------------------------- speed

void Speedometer::pass(Nanos busy_ns) noexcept {
    constexpr Nanos kWindow = 200'000'000;
    constexpr double kPure = 0.9, kKeep = 0.7;
    window_ns_ += busy_ns;
    window_read_ += read_;
    window_written_ += written_;
    skip();
    if (window_ns_ < kWindow) return;
    const auto blend = [](std::atomic<double>& rate, double seen) {
        const double old = rate.load(std::memory_order_relaxed);
        rate.store(old == 0 ? seen : kKeep * old + (1 - kKeep) * seen, std::memory_order_relaxed);
    };
    const double seconds = static_cast<double>(window_ns_) * 1e-9;
    const auto read = static_cast<double>(window_read_),
               written = static_cast<double>(window_written_);
    blend(rate_, (read + written) / seconds);
    // A mixed window says little about either direction alone.
    if (read >= kPure * (read + written)) blend(read_rate_, read / seconds);
    if (written >= kPure * (read + written)) blend(write_rate_, written / seconds);
    window_read_ = window_written_ = window_ns_ = 0;
}

void Speedometer::report(QueueCounters& counters) const noexcept {
    counters.read_bytes_per_s = read_rate_.load(std::memory_order_relaxed);
    counters.write_bytes_per_s = write_rate_.load(std::memory_order_relaxed);
    counters.bytes_per_s = rate_.load(std::memory_order_relaxed);
}

// ---------------------------------------------------------------- step thread

Queue::Queue(QueueOptions options, std::unique_ptr<Backend> backend, Executor& executor)
    : options_(std::move(options)),
      backend_(std::move(backend)),
      executor_(executor),
      // A cancel order can stand between any two operations.
      inbox_(static_cast<size_t>(2 * options_.operations_max + 1)),
      outbox_(static_cast<size_t>(options_.operations_max)),
      entries_(static_cast<size_t>(options_.operations_max)),
      newest_of_slot_(options_.slots, kNone),
      flush_errors_(static_cast<size_t>(options_.files)),
      flights_(static_cast<size_t>(options_.depth)),
      completions_(static_cast<size_t>(options_.depth)) {
    for (auto i = static_cast<uint32_t>(entries_.size()); i-- > 0;) free_entries_.push_back(i);
    for (auto i = static_cast<uint32_t>(flights_.size()); i-- > 0;) free_flights_.push_back(i);
    resting_.reserve(flights_.size());
    outgoing_.reserve(flights_.size());
}

Queue::~Queue() = default;

void Queue::submit(const Request& request) noexcept {
    FERRY_CHECK(inbox_.push(request), "more operations than operations_max");
    cancellable_ = request.operation != nullptr;
    if (sleeping_.exchange(false, std::memory_order_seq_cst)) backend_->wake();
}

void Queue::cancel() noexcept {
    if (cancellable_) submit(Request{});
}

Operation* Queue::poll() noexcept {
    Operation* operation = nullptr;
    return outbox_.pop(operation) ? operation : nullptr;
}

QueueCounters Queue::counters() const noexcept {
    const auto get = [](const auto& counter) { return counter.load(std::memory_order_relaxed); };
    QueueCounters counters{.bytes_read = get(counts_.bytes_read),
                           .bytes_written = get(counts_.bytes_written),
                           .bytes_retried = get(counts_.bytes_retried),
                           .bytes_overhead = get(counts_.bytes_overhead),
                           .reads = get(counts_.reads),
                           .writes = get(counts_.writes),
                           .retries = get(counts_.retries),
                           .errors = get(counts_.errors)};
    speed_.report(counters);
    return counters;
}

// ---------------------------------------------------------------- one round

// The thread is the executor's; it comes here first in its first round.
void Queue::stay_near_the_drive() {
    placed_ = true;
    if (options_.cores.empty()) return;
    if (!run_on(options_.cores))
        log_warn("aio: " + options_.name +
                 " cannot run on the cores it was given: " + std::strerror(errno));
}

void Queue::run_once(Nanos until) {
    if (!placed_) stay_near_the_drive();
    now_ = std::max(now_, backend_->now());
    take_requests();
    issue();
    tell();  // before sleeping: a cancellation finishes operations too
    const int count = backend_->reap(completions_, sleep_until(until));
    sleeping_.store(false, std::memory_order_seq_cst);
    now_ = backend_->now();
    in_backend_ -= count;
    for (int i = 0; i < count; ++i) {
        const Completion& completion = completions_[static_cast<size_t>(i)];
        bytes_in_backend_ -= flights_[completion.id].left();
        complete(completion);
    }
    busy_ ? speed_.pass(now_ - measured_at_) : speed_.skip();
    measured_at_ = now_;
    take_requests();
    issue();
    busy_ = 2 * static_cast<size_t>(in_backend_) >= flights_.size() ||
            bytes_in_backend_ >= kSaturatingBytes;
    tell();
}

// Wakes the step thread once for all that finished. It does so at once where one of them is urgent
// or large, or the ring needs more to do. Else it waits a little for what finishes until then.
void Queue::tell() {
    if (!delivered_) return;
    const bool more_to_do =
        std::ranges::any_of(ready_, [](const List& ready) { return ready.first != kNone; });
    if (!pressing_ && more_to_do && now_ - told_at_ < kTellEvery) return;
    executor_.wake();
    delivered_ = pressing_ = false;
    told_at_ = now_;
}

Nanos Queue::next_event() const {
    constexpr Nanos kAtOnce = 0;
    if (!inbox_.empty()) return kAtOnce;
    if (!outgoing_.empty() && in_backend_ == 0) return kAtOnce;
    Nanos next = backend_->next_event();
    if (delivered_) next = std::min(next, told_at_ + kTellEvery);
    for (const uint32_t id : resting_) next = std::min(next, flights_[id].retry_at);
    return next;
}

// Until when reap() may sleep. Announces the sleep first and then looks at the inbox again: a
// request pushed in between either is seen here or sees the announcement and wakes the backend.
Nanos Queue::sleep_until(Nanos until) {
    constexpr Nanos kDoNotSleep = 0;
    if (!outgoing_.empty() && in_backend_ == 0) return kDoNotSleep;
    // With every transfer in use a new request could only wait for the next completion. It need not
    // wake us, which saves most wake-ups of a busy ring.
    if (!free_flights_.empty()) {
        sleeping_.store(true, std::memory_order_seq_cst);
        if (!inbox_.empty()) return kDoNotSleep;
    }
    for (const uint32_t id : resting_) until = std::min(until, flights_[id].retry_at);
    if (delivered_) until = std::min(until, told_at_ + kTellEvery);
    return until;
}

// ---------------------------------------------------------------- intake

void Queue::take_requests() {
    Request request;
    while (inbox_.pop(request)) request.operation ? enter(request) : cancel_unissued();
}

void Queue::enter(const Request& request) {
    FERRY_CHECK(!free_entries_.empty(), "more operations than operations_max");
    const uint32_t index = free_entries_.back();
    free_entries_.pop_back();
    entries_[index] = Entry{.request = request, .priority = request.operation->priority};
    if (fails_like_before(index)) return;
    if (link_to_slot(index)) {
        raise_older(index, request.operation->priority);
    } else {
        list(index);
    }
}

// The kernel reports lost write-back once, to the first flush that asks, and forgets it. Whatever a
// later flush says, those bytes are not on stable storage. So it fails with the same error.
bool Queue::fails_like_before(uint32_t index) {
    const Request& request = entries_[index].request;
    if (request.verb != Verb::flush || flush_errors_[request.file] == 0) return false;
    entries_[index].error = flush_errors_[request.file];
    finish(index, State::failed);
    return true;
}

// Appends to the chain of the operation's slot; true when an older one must finish first.
bool Queue::link_to_slot(uint32_t index) {
    Entry& entry = entries_[index];
    const SlotId slot = entry.request.operation->slot;
    if (slot == kNoSlot) return false;
    entry.older = newest_of_slot_[slot];
    newest_of_slot_[slot] = index;
    if (entry.older != kNone) entries_[entry.older].newer = index;
    for (uint32_t i = entry.older; i != kNone; i = entries_[i].older)
        if (conflict(entries_[i], entry)) ++entry.blockers;
    return entry.blockers > 0;
}

bool Queue::conflict(const Entry& a, const Entry& b) const noexcept {
    if (a.request.verb == Verb::read && b.request.verb == Verb::read) return false;
    const int64_t a_begin = a.request.file_offset, b_begin = b.request.file_offset;
    return a_begin < b_begin + b.request.size_bytes && b_begin < a_begin + a.request.size_bytes;
}

// An urgent read that waits for a background write must not wait for the whole background.
void Queue::raise_older(uint32_t index, Priority priority) {
    for (uint32_t i = entries_[index].older; i != kNone; i = entries_[i].older) {
        if (entries_[i].priority <= priority) continue;
        const bool was_listed = entries_[i].listed;
        if (was_listed) unlist(i);
        entries_[i].priority = priority;
        if (was_listed) list(i);
    }
}

void Queue::list(uint32_t index) {
    Entry& entry = entries_[index];
    List& ready = ready_[index_of(entry.priority)];
    entry.previous = ready.last;
    entry.next = kNone;
    (ready.last == kNone ? ready.first : entries_[ready.last].next) = index;
    ready.last = index;
    entry.listed = true;
}

void Queue::unlist(uint32_t index) {
    Entry& entry = entries_[index];
    List& ready = ready_[index_of(entry.priority)];
    (entry.previous == kNone ? ready.first : entries_[entry.previous].next) = entry.next;
    (entry.next == kNone ? ready.last : entries_[entry.next].previous) = entry.previous;
    entry.listed = false;
}

// An operation that has been issued in part goes on: no cancellation leaves a slot half written.
void Queue::cancel_unissued() {
    for (uint32_t i = 0; i < entries_.size(); ++i) {
        Entry& entry = entries_[i];
        const bool callers = entry.request.operation && entry.request.owner == Owner::caller;
        if (!callers || entry.issued_bytes > 0) continue;
        finish(i, State::cancelled);
    }
}

// ---------------------------------------------------------------- towards the backend

void Queue::issue() {
    rouse();
    while (!free_flights_.empty() && start_flight()) {
    }
    if (outgoing_.empty()) return;
    const int taken = backend_->submit(outgoing_);
    for (int i = 0; i < taken; ++i)
        bytes_in_backend_ += outgoing_[static_cast<size_t>(i)].size_bytes;
    outgoing_.erase(outgoing_.begin(), outgoing_.begin() + taken);
    in_backend_ += taken;
}

void Queue::rouse() {
    std::erase_if(resting_, [this](uint32_t id) {
        if (flights_[id].retry_at > now_) return false;
        const int error = entries_[flights_[id].entry].error;
        error ? land(id) : send(id);
        return true;
    });
}

// Sends the next block of the first ready operation of the highest priority.
bool Queue::start_flight() {
    uint32_t index = kNone;
    for (size_t i = 0; i < kLists && index == kNone; ++i) index = ready_[i].first;
    if (index == kNone) return false;
    Entry& entry = entries_[index];
    const Request& request = entry.request;
    const bool split = request.verb == Verb::read || request.verb == Verb::write;
    const int64_t most =
        request.verb == Verb::write && options_.whole_writes ? kWholeMax : options_.block_bytes;
    const int64_t left = request.size_bytes - entry.issued_bytes;
    const int64_t size = split ? std::min(left, most) : left;
    const uint32_t id = free_flights_.back();
    free_flights_.pop_back();
    flights_[id] = Flight{.entry = index, .offset = entry.issued_bytes, .size_bytes = size};
    entry.issued_bytes += size;
    ++entry.flights;
    if (entry.issued_bytes == request.size_bytes) unlist(index);
    send(id);
    return true;
}

void Queue::send(uint32_t id) {
    Flight& flight = flights_[id];
    flight.sent = now_;
    const Request& request = entries_[flight.entry].request;
    const int64_t at = flight.offset + flight.done_bytes;
    const bool data = request.verb == Verb::read || request.verb == Verb::write;
    outgoing_.push_back({.verb = request.verb,
                         .file = request.file,
                         .id = id,
                         .offset = request.file_offset + at,
                         .data = data ? request.operation->buffer.data() + at : nullptr,
                         .size_bytes = flight.left()});
}

// ---------------------------------------------------------------- back from the backend

void Queue::trace(const Completion& completion) const {
    const Flight& flight = flights_[completion.id];
    const Request& request = entries_[flight.entry].request;
    options_.tracer.transfer(options_.tracer.context,
                             {.verb = request.verb,
                              .path = options_.path,
                              .ring = options_.ring,
                              .file = request.file,
                              .tag = request.operation->tag,
                              .offset = request.file_offset + flight.offset + flight.done_bytes,
                              .bytes = std::max(completion.result, 0),
                              .error = std::max(-completion.result, 0),
                              .start_ns = flight.sent,
                              .end_ns = now_});
}

void Queue::complete(const Completion& completion) {
    if (options_.tracer.transfer) trace(completion);
    const Flight& flight = flights_[completion.id];
    const Verb verb = entries_[flight.entry].request.verb;
    if (now_ - flight.sent > kStall)
        log_warn("aio: a " + std::string(name_of(verb)) + " of " + options_.name + " took " +
                 std::to_string((now_ - flight.sent) / 1'000'000'000) + " s");
    if (completion.result < 0) return failed(completion.id, -completion.result);
    if (verb == Verb::flush || verb == Verb::discard) return moved(completion.id, flight.left());
    FERRY_CHECK(completion.result <= flight.left(), "the kernel moved more bytes than asked for");
    moved(completion.id, completion.result);
}

int64_t Queue::file_end(uint32_t id) const noexcept {
    const Flight& flight = flights_[id];
    return entries_[flight.entry].request.file_offset + flight.offset + flight.size_bytes;
}

void Queue::failed(uint32_t id, int error) {
    const Verb verb = entries_[flights_[id].entry].request.verb;
    error = cause_of(verb, error, file_end(id));
    switch (classify(verb, error)) {
        case ErrorClass::retry:
            return rest(id, error);
        case ErrorClass::bug:
            bug("a transfer was built wrong",
                std::string(name_of(verb)) + " of " + options_.name + ": " + strerror(error));
        case ErrorClass::fail:
            return abandon(id, error);
    }
}

void Queue::moved(uint32_t id, int64_t bytes) {
    Flight& flight = flights_[id];
    const Verb verb = entries_[flight.entry].request.verb;
    // O_DIRECT cannot resume inside a block; a flush or discard is one piece.
    const bool whole = flight.done_bytes + bytes == flight.size_bytes;
    const int64_t kept = whole ? bytes : round_down(bytes, options_.alignment);
    flight.done_bytes += kept;
    bump(counts_.bytes_retried, bytes - kept);
    if (verb == Verb::read) bump(counts_.bytes_read, kept), bump(counts_.reads, whole);
    if (verb == Verb::write) {
        const bool own = entries_[flight.entry].request.owner != Owner::caller;
        bump(counts_.bytes_written, own ? 0 : kept);
        bump(counts_.bytes_overhead, own ? bytes : bytes - kept);
        bump(counts_.writes, whole);
    }
    speed_.add(verb, kept);
    if (whole) return land(id);
    // Each resume with progress is bounded by the size; without, by the attempts.
    if (kept == 0) return rest(id, cause_of(verb, EIO, file_end(id)));
    flight.attempts = 0;
    bump(counts_.retries, 1);
    entries_[flight.entry].error ? land(id) : send(id);
}

void Queue::rest(uint32_t id, int error_when_spent) {
    Flight& flight = flights_[id];
    if (entries_[flight.entry].error) return land(id);
    if (++flight.attempts > kAttemptsMax) return abandon(id, error_when_spent);
    bump(counts_.retries, 1);
    if (flight.attempts <= kAttemptsAtOnce) return send(id);
    const int doublings = flight.attempts - kAttemptsAtOnce - 1;
    flight.retry_at = now_ + std::min(kRestMax, kRestFirst << doublings);
    resting_.push_back(id);
}

void Queue::abandon(uint32_t id, int error) {
    const uint32_t index = flights_[id].entry;
    Entry& entry = entries_[index];
    if (entry.error == 0) {
        entry.error = error;
        if (entry.listed) unlist(index);
        bump(counts_.errors, 1);
        if (entry.request.verb == Verb::flush && classify(Verb::flush, error) == ErrorClass::fail)
            flush_errors_[entry.request.file] = error;
    }
    land(id);
}

void Queue::land(uint32_t id) {
    const Flight& flight = flights_[id];
    Entry& entry = entries_[flight.entry];
    if (entry.request.operation) entry.request.operation->done_bytes += flight.done_bytes;
    const uint32_t index = flight.entry;
    free_flights_.push_back(id);
    if (--entry.flights > 0) return;
    if (entry.error) return finish(index, State::failed);
    if (entry.issued_bytes == entry.request.size_bytes) finish(index, State::done);
}

void Queue::finish(uint32_t index, State state) {
    Entry& entry = entries_[index];
    Operation& operation = *entry.request.operation;
    if (entry.listed) unlist(index);
    if (operation.slot != kNoSlot) {
        for (uint32_t i = entry.newer; i != kNone; i = entries_[i].newer)
            if (conflict(entry, entries_[i]) && --entries_[i].blockers == 0) list(i);
        if (entry.older != kNone) entries_[entry.older].newer = entry.newer;
        if (entry.newer != kNone) entries_[entry.newer].older = entry.older;
        if (newest_of_slot_[operation.slot] == index) newest_of_slot_[operation.slot] = entry.older;
    }
    operation.state = state;
    operation.error = entry.error;
    operation.finished_ns = now_;
    const bool polled = entry.request.owner != Owner::volume;
    entry.request.operation = nullptr;
    free_entries_.push_back(index);
    delivered_ = true;
    pressing_ |= entry.priority == Priority::urgent || entry.request.size_bytes >= kSmallBytes;
    if (polled) FERRY_CHECK(outbox_.push(&operation), "more operations than operations_max");
    finished_.fetch_add(1, std::memory_order_release);
}

}  // namespace ferry::aio
