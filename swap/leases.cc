// Objects by demand. A buffer holds one object's newest contents; least recently used buffers are
// written back ahead of need and taken first.
#include <algorithm>
#include <iterator>
#include <list>
#include <optional>
#include <string>
#include <utility>

#include "ferry/lease.h"
#include "lease_options.h"
#include "object_table.h"

namespace ferry::swap {
namespace {

// The contents of a buffer.
enum class Holds : uint8_t {
    nothing,
    incoming,  // a read is under way
    unproved,  // it was read, and is not verified yet
    clean,     // NVMe has the same
    changed,   // nothing else has it
    outgoing,  // the same, and a write is under way
};

struct Buffer {
    std::span<std::byte> memory{};
    Holds holds = Holds::nothing;
    ObjectId object = kNoObject;
    bool hinted = false;  // prefetched, and not leased since
    aio::Operation operation{};
    std::list<Buffer>::iterator self{};

    bool moves() const { return holds == Holds::incoming || holds == Holds::outgoing; }
};

struct Entry {
    Buffer* buffer = nullptr;  // with its newest contents, or where they will be
    uint32_t readers = 0;
    bool writer = false;
    bool stored = false;                     // a version lies on NVMe
    std::optional<aio::Operation> failed{};  // the write whose contents are lost

    bool leased() const { return writer || readers > 0; }
};

// Each write to NVMe goes to a fresh slot.
Objects table_objects(LeasedStoreOptions& options) {
    std::vector<Object> objects;
    objects.reserve(options.objects.size());
    for (const LeasedObject& object : options.objects) {
        objects.push_back({.home = on_nvme(object) ? Tier::nvme : Tier::host,
                           .bytes = object.bytes,
                           .offset = object.offset,
                           .slot_class = object.slot_class,
                           .versioned = on_nvme(object)});
    }
    return {.objects = std::move(objects),
            .host_arena = options.host_arena,
            .parallel = std::move(options.parallel)};
}

}  // namespace

// ---------------------------------------------------------------- the store

class LeasedStore::Buffers {
public:
    Buffers(LeasedStoreOptions options, Executor& executor, aio::Volume* volume)
        : executor_(executor),
          volume_(volume),
          alignment_(volume ? volume->alignment() : 1),
          buffer_bytes_(options.buffer_bytes),
          spare_buffers_(options.spare_buffers),
          verify_(options.verify),
          table_(table_objects(options), {}, volume),
          entries_(static_cast<size_t>(table_.size())) {
        for (int64_t id = 0; id < table_.size(); ++id) {
            const auto object = static_cast<ObjectId>(id);
            if (!on_nvme(object)) table_.place_initially(object);
        }
        const int64_t count = buffer_bytes_ ? std::ssize(options.buffers) / buffer_bytes_ : 0;
        for (int64_t i = 0; i < count; ++i) {
            Buffer& buffer = buffers_.emplace_back();
            buffer.memory = options.buffers.subspan(static_cast<size_t>(i * buffer_bytes_),
                                                    static_cast<size_t>(buffer_bytes_));
            buffer.self = std::prev(buffers_.end());
        }
        if (spare_buffers_ == 0) spare_buffers_ = std::max<int64_t>(1, count / 4);
    }

    ~Buffers() {
        FERRY_CHECK(leases_ == 0, "a lease outlives its store");
        while (moving_ > 0) wait();
        table_.free_slots();
    }

    // The object's bytes, until take_back().
    std::span<std::byte> lend(ObjectId id, Access access) {
        Entry& entry = entry_of(id);
        refuse_conflict(id, access);
        const int64_t effort = effort_;
        std::span<std::byte> bytes;
        if (!on_nvme(id))
            bytes = {table_.current_address(id), static_cast<size_t>(table_.object(id).bytes)};
        else if (access == Access::overwrite)
            bytes = lend_buffer(id, buffer_to_fill(id), Holds::changed);
        else
            bytes = lend_buffer(id, buffer_with_contents(id, access),
                                access == Access::write ? Holds::changed : Holds::clean);
        access == Access::read ? void(++entry.readers) : void(entry.writer = true);
        ++leases_;
        ++report_.acquired;
        report_.hits += effort == effort_;
        write_ahead();
        return bytes;
    }
    void take_back(ObjectId id) noexcept {
        Entry& entry = entries_[id];
        entry.writer ? void(entry.writer = false) : void(--entry.readers);
        --leases_;
        if (entry.buffer && !entry.leased()) {
            touch(*entry.buffer);
            // Its write has failed while it was read.
            if (entry.failed) vacate(*entry.buffer);
        }
        write_ahead();
    }

    void prefetch(ObjectId id) {
        Entry& entry = entry_of(id);
        if (!on_nvme(id)) return;
        collect();
        if (!entry.buffer && entry.stored && !entry.failed) {
            Buffer* const buffer = takeable(/*despite_hint=*/false);
            if (buffer) start_read(*buffer, id, aio::Priority::normal);
        }
        if (entry.buffer) {
            entry.buffer->hinted = true;
            touch(*entry.buffer);
        }
        write_ahead();
    }

    void flush() {
        const auto waits = [this](const Buffer& buffer) {
            return buffer.holds == Holds::changed && !entries_[buffer.object].writer;
        };
        collect();
        while (true) {
            bool unwritten = false;
            for (Buffer& buffer : buffers_) {
                if (waits(buffer)) start_write(buffer);
                unwritten |= waits(buffer) || buffer.holds == Holds::outgoing;
            }
            if (!unwritten) break;
            wait();
        }
        check();
    }

    void check() {
        collect();
        if (failures_ == 0) return;
        const auto first = std::ranges::min_element(entries_, {}, [](const Entry& entry) {
            return entry.failed ? entry.failed->finished_ns : kForever;
        });
        throw_failure(static_cast<ObjectId>(first - entries_.begin()));
    }

    bool revert(ObjectId id) {
        Entry& entry = entry_of(id);
        collect();
        if (entry.leased())
            throw Error(Trouble::usage, {.what = "an object is reverted while it is leased",
                                         .where = object_name(id),
                                         .remedy = "give its leases back first"});
        forget_failure(entry);
        return !on_nvme(id) || entry.stored || entry.buffer != nullptr;
    }

    LeaseReport report() const { return report_; }

private:
    bool on_nvme(ObjectId id) const { return table_.object(id).home == Tier::nvme; }

    // ---- what is refused

    Entry& entry_of(ObjectId id) {
        if (id < entries_.size()) return entries_[id];
        throw Error(Trouble::usage,
                    {.what = "there is no such object",
                     .where = object_name(id),
                     .limit = std::to_string(entries_.size()) + " objects, the first is 0"});
    }

    // The owner thread would wait for itself.
    void refuse_conflict(ObjectId id, Access access) {
        const Entry& entry = entries_[id];
        if (!entry.writer && (access == Access::read || entry.readers == 0)) return;
        throw Error(
            Trouble::usage,
            {.what = "an object that is leased is asked for again, and not both only to be read",
             .where = object_name(id),
             .measured = entry.writer ? "leased to a writer"
                                      : "leased to " + std::to_string(entry.readers) + " readers",
             .limit = "one writer, or any number of readers",
             .remedy = "give the lease back before the next acquire()"});
    }

    void throw_failure(ObjectId id) const {
        const std::optional<aio::Operation>& failed = entries_[id].failed;
        if (!failed) return;
        Problem problem = table_.to_error(id, *failed).problem();
        problem.remedy +=
            "; what was to be written is lost: revert() goes back to the contents before it, "
            "Access::overwrite gives new ones";
        throw_of(id, std::move(problem));
    }

    [[noreturn]] static void throw_of(ObjectId id, Problem problem) {
        problem.where += ", " + object_name(id);
        throw Error(Trouble::io, std::move(problem));
    }

    void forget_failure(Entry& entry) {
        if (entry.failed) --failures_;
        entry.failed.reset();
    }

    // ---- leases

    std::span<std::byte> lend_buffer(ObjectId id, Buffer& buffer, Holds holds) {
        // A reader may come while a write is under way or before it has begun.
        if (holds == Holds::changed || buffer.holds == Holds::unproved) buffer.holds = holds;
        buffer.hinted = false;
        return buffer.memory.first(static_cast<size_t>(table_.object(id).bytes));
    }

    Buffer& buffer_to_fill(ObjectId id) {
        Entry& entry = entries_[id];
        collect();
        // A read or write that fails meanwhile leaves the object without a buffer.
        while (!entry.buffer || entry.buffer->moves()) {
            if (entry.buffer)
                wait();
            else
                attach(take_buffer(), id);
        }
        forget_failure(entry);
        return *entry.buffer;
    }

    Buffer& buffer_with_contents(ObjectId id, Access access) {
        Entry& entry = entries_[id];
        collect();
        throw_failure(id);
        if (!entry.buffer && !entry.stored)
            throw Error(Trouble::usage, {.what = "an object is leased that was never written",
                                         .where = object_name(id),
                                         .remedy = "acquire it with Access::overwrite first"});
        if (!entry.buffer) {
            Buffer& taken = take_buffer();
            while (!start_read(taken, id, aio::Priority::urgent)) wait();
        }
        Buffer& buffer = *entry.buffer;
        while (buffer.holds == Holds::incoming ||
               (buffer.holds == Holds::outgoing && access != Access::read))
            wait();
        throw_failure(id);
        if (buffer.holds == Holds::nothing)
            throw_of(id, table_.to_error(id, buffer.operation).problem());
        if (buffer.holds == Holds::unproved) prove(id, buffer);
        return buffer;
    }

    void prove(ObjectId id, Buffer& buffer) {
        const auto size = static_cast<size_t>(table_.object(id).bytes);
        const int64_t wrong = verify_ ? table_.verify(id, buffer.memory.first(size)) : -1;
        if (wrong < 0) return;
        vacate(buffer);
        throw_of(id, table_.wrong_bytes(id, wrong).problem());
    }

    // ---- buffers: the least recently used first

    void touch(Buffer& buffer) { buffers_.splice(buffers_.end(), buffers_, buffer.self); }

    void attach(Buffer& buffer, ObjectId id) {
        if (buffer.object != kNoObject) vacate(buffer);
        buffer.object = id;
        entries_[id].buffer = &buffer;
    }

    void vacate(Buffer& buffer) {
        entries_[buffer.object].buffer = nullptr;
        buffer.object = kNoObject;
        buffer.holds = Holds::nothing;
        buffer.hinted = false;
        buffers_.splice(buffers_.begin(), buffers_, buffer.self);
    }

    bool leased(const Buffer& buffer) const {
        return buffer.object != kNoObject && entries_[buffer.object].leased();
    }

    Buffer* takeable(bool despite_hint) {
        const auto found = std::ranges::find_if(buffers_, [&](const Buffer& buffer) {
            return !buffer.moves() && buffer.holds != Holds::changed && !leased(buffer) &&
                   (despite_hint || !buffer.hinted);
        });
        return found == buffers_.end() ? nullptr : &*found;
    }

    Buffer& take_buffer() {
        while (true) {
            if (Buffer* const buffer = takeable(/*despite_hint=*/true)) return *buffer;
            write_ahead();
            // Operations that ended since the last look have been collected.
            if (Buffer* const buffer = takeable(/*despite_hint=*/true)) return *buffer;
            // Whatever no lease holds is on its way now: there is a slot for one write at least.
            if (moving_ == 0) throw all_leased();
            wait();
        }
    }

    Error all_leased() const {
        return {Trouble::does_not_fit,
                {.what = "every buffer is held by a lease",
                 .measured = std::to_string(buffers_.size()) + " buffers leased",
                 .limit =
                     std::to_string(buffers_.size()) + " buffers of " + format_bytes(buffer_bytes_),
                 .remedy = "give a lease back first, or give the store more memory "
                           "(LeasedStoreOptions::buffers)"}};
    }

    void write_ahead() noexcept {
        collect();
        int64_t spare = 0;
        for (Buffer& buffer : buffers_) {
            if (spare == spare_buffers_) return;
            if (leased(buffer)) continue;
            ++spare;
            if (buffer.holds == Holds::changed && !start_write(buffer)) return;
        }
    }

    // ---- transfers

    // Transfers are whole blocks; what lies behind the object's end is anything.
    std::span<std::byte> blocks_of(const Buffer& buffer, ObjectId id) const {
        const int64_t bytes = round_up(table_.object(id).bytes, alignment_);
        return buffer.memory.first(static_cast<size_t>(bytes));
    }

    bool submit(Buffer& buffer, const aio::Operation& operation) noexcept {
        buffer.operation = operation;
        buffer.operation.tag = reinterpret_cast<uint64_t>(&buffer);
        if (!volume_->try_submit(buffer.operation)) return false;
        ++moving_;
        ++effort_;
        return true;
    }

    // False: the volume has operations_max under way, and the buffer holds what it held.
    bool start_read(Buffer& buffer, ObjectId id, aio::Priority priority) noexcept {
        aio::Operation operation = table_.read_into(id, blocks_of(buffer, id));
        operation.priority = priority;
        if (!submit(buffer, operation)) return false;
        attach(buffer, id);
        buffer.holds = Holds::incoming;
        ++report_.reads;
        return true;
    }

    // False: the former, or all slots of its class are in use; a write under way will free one.
    bool start_write(Buffer& buffer) noexcept {
        const auto operation = table_.write_from(buffer.object, blocks_of(buffer, buffer.object));
        if (!operation) return false;
        if (!submit(buffer, *operation)) {
            table_.rollback(buffer.object);
            return false;
        }
        buffer.holds = Holds::outgoing;
        // While the first blocks are on their way: nobody reads this version back before it is
        // committed.
        const auto size = static_cast<size_t>(table_.object(buffer.object).bytes);
        if (verify_) table_.seal(buffer.object, buffer.memory.first(size));
        ++report_.writes;
        return true;
    }

    void wait() noexcept {
        FERRY_CHECK(moving_ > 0, "nothing is under way that could end the wait");
        ++effort_;
        executor_.wait(kForever);
        collect();
    }

    void collect() noexcept {
        while (aio::Operation* operation = volume_ ? volume_->poll() : nullptr) {
            Buffer& buffer = *reinterpret_cast<Buffer*>(operation->tag);
            --moving_;
            buffer.holds == Holds::incoming ? end_read(buffer) : end_write(buffer);
        }
    }

    void end_read(Buffer& buffer) noexcept {
        buffer.holds = Holds::unproved;
        // The operation stays for whoever waits for it.
        if (buffer.operation.state != aio::State::done) vacate(buffer);
    }

    void end_write(Buffer& buffer) noexcept {
        Entry& entry = entries_[buffer.object];
        buffer.holds = Holds::clean;
        if (buffer.operation.state == aio::State::done) {
            table_.commit(buffer.object);
            entry.stored = true;
            return;
        }
        table_.rollback(buffer.object);
        entry.failed = buffer.operation;
        ++failures_;
        if (!entry.leased()) vacate(buffer);
    }

    Executor& executor_;
    aio::Volume* volume_;
    const int64_t alignment_, buffer_bytes_;
    int64_t spare_buffers_;
    const bool verify_;
    ObjectTable table_;
    std::vector<Entry> entries_;
    std::list<Buffer> buffers_{};
    int64_t leases_ = 0;
    int64_t moving_ = 0;    // transfers under way
    int64_t failures_ = 0;  // entries with a failed write
    int64_t effort_ = 0;    // transfers begun and waits, ever
    LeaseReport report_{};
};

LeasedStore::LeasedStore(LeasedStoreOptions options, Executor& executor, aio::Volume* volume)
    : buffers_(std::make_unique<Buffers>(std::move(options), executor, volume)) {}

LeasedStore::~LeasedStore() = default;

std::unique_ptr<LeasedStore> LeasedStore::make(LeasedStoreOptions options, Executor& executor,
                                               aio::Volume* volume) {
    complete(options, volume);
    return std::unique_ptr<LeasedStore>(new LeasedStore(std::move(options), executor, volume));
}

Lease LeasedStore::acquire(ObjectId object, Access access) {
    return {*this, object, buffers_->lend(object, access)};
}
void LeasedStore::prefetch(ObjectId object) { buffers_->prefetch(object); }
void LeasedStore::flush() { buffers_->flush(); }
void LeasedStore::check() { buffers_->check(); }
bool LeasedStore::revert(ObjectId object) { return buffers_->revert(object); }
LeaseReport LeasedStore::report() const { return buffers_->report(); }
void LeasedStore::take_back(ObjectId object) noexcept { buffers_->take_back(object); }

}  // namespace ferry::swap
