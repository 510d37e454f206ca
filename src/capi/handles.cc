#include "handles.h"

#include <pthread.h>

#include <atomic>
#include <shared_mutex>
#include <vector>

#include "callbacks.h"

namespace ferry::capi {
namespace {

// A ticket is no address that a program could hold: bits 48 to 63 say ferry's, 16 to 47 the
// generation of the place, 0 to 15 the place.
constexpr uint64_t kMark = uint64_t{0xFE44} << 48;
constexpr size_t kPlaces = size_t{1} << 16;

struct Place {
    uint32_t generation = 0;
    std::shared_ptr<HandleEntry> entry{};
};

struct Table {
    Table() {
        // Its threads are not in the child, nor what they were at.
        pthread_atfork(nullptr, nullptr, [] { table().forked = true; });
    }
    static Table& table() {
        static Table* const kTable = new Table;  // calls may come until the very end of the process
        return *kTable;
    }

    std::shared_mutex mutex{};
    std::vector<Place> places{};
    std::vector<size_t> free{};
    std::vector<std::shared_ptr<void>> abandoned{};
    std::atomic<bool> forked = false;
};

void* ticket(size_t place, uint32_t generation) {
    const uint64_t bits = kMark | (uint64_t{generation} << 16) | place;
    return reinterpret_cast<void*>(static_cast<uintptr_t>(bits));
}

size_t place_of(const void* handle) { return reinterpret_cast<uintptr_t>(handle) % kPlaces; }

const char* name_of(HandleKind kind) {
    static constexpr const char* kNames[] = {"ferry_aio",  "ferry_pool",   "ferry_store",
                                             "ferry_team", "ferry_engine", "ferry_files"};
    return kNames[static_cast<size_t>(kind)];
}

[[noreturn]] void refuse_handle(const std::string& why) { throw Refused(FERRY_BAD_HANDLE, why); }

}  // namespace

void* add_handle(std::shared_ptr<HandleEntry> entry) {
    Table& table = Table::table();
    // Before the lock, which a thread that the child has not got may have held.
    if (table.forked) refuse_handle("this process was forked after it had used ferry");
    const std::lock_guard lock(table.mutex);
    if (table.free.empty()) {
        if (table.places.size() == kPlaces)
            throw Error(Trouble::usage, {.what = "too many handles are open",
                                         .measured = std::to_string(kPlaces),
                                         .remedy = "close those that are no longer used"});
        table.free.reserve(table.places.size() + 1);  // remove_handle() must not fail
        table.places.emplace_back();
        table.free.push_back(table.places.size() - 1);
    }
    const size_t index = table.free.back();
    table.free.pop_back();
    Place& place = table.places[index];
    place.entry = std::move(entry);
    return ticket(index, ++place.generation);
}

std::shared_ptr<HandleEntry> find_handle(const void* handle, HandleKind kind) {
    if (!handle) refuse_handle("the handle is NULL");
    Table& table = Table::table();
    if (table.forked) refuse_handle("a handle does not outlive fork() in the child");
    const std::shared_lock lock(table.mutex);
    const size_t index = place_of(handle);
    if (index >= table.places.size() || ticket(index, table.places[index].generation) != handle ||
        !table.places[index].entry)
        refuse_handle("no such handle: it was closed, or never was one");
    const std::shared_ptr<HandleEntry>& entry = table.places[index].entry;
    if (entry->kind != kind)
        refuse_handle(std::string("the handle is a ") + name_of(entry->kind) + ", not a " +
                      name_of(kind));
    return entry;
}

void remove_handle(const void* handle) {
    Table& table = Table::table();
    const std::lock_guard lock(table.mutex);
    const size_t index = place_of(handle);
    table.places[index].entry.reset();
    table.free.push_back(index);
}

Call::Call(HandleEntry& entry) : entry_(entry) {
    if (entry_.caller.load(std::memory_order_relaxed) == std::this_thread::get_id() ||
        InCallback::of(entry_.identity))
        refuse_busy("a callback calls with the handle whose call it is within",
                    "call with other handles, or when the callback has returned");
    if (entry_.kind == HandleKind::engine && InCallback::of(any_engine()))
        refuse_busy("the callback of ferry_on_stuck calls with an engine, whose call may be stuck",
                    "end the process, or return");
    entry_.mutex.lock();
    entry_.caller.store(std::this_thread::get_id(), std::memory_order_relaxed);
}

Call::~Call() {
    entry_.caller.store({}, std::memory_order_relaxed);
    entry_.mutex.unlock();
}

void abandon(std::shared_ptr<void> object) {
    Table& table = Table::table();
    const std::lock_guard lock(table.mutex);
    table.abandoned.push_back(std::move(object));
}

void check_usable(const HandleEntry& entry, bool also_poisoned) {
    if (!entry.object) refuse_handle("the handle was closed meanwhile");
    if (!entry.poisoned || also_poisoned) return;
    throw Refused(FERRY_POISONED,
                  "an earlier call on this handle met a bug in ferry: it can only be closed");
}

}  // namespace ferry::capi
