// Handles as tickets of a table: whatever a program passes in is looked up, never followed.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <new>
#include <thread>
#include <utility>

#include "status.h"

namespace ferry::capi {

enum class HandleKind : uint8_t { aio, pool, store, team, engine, files };

struct HandleEntry {
    explicit HandleEntry(HandleKind entry_kind, std::shared_ptr<void> of)
        : kind(entry_kind), object(std::move(of)) {}
    const HandleKind kind;
    std::mutex mutex{};                     // one call at a time
    std::atomic<std::thread::id> caller{};  // whose call that is
    std::shared_ptr<void> object{};         // null: closed
    const void* const identity = object.get();
    bool poisoned = false;  // a bug was found
};

// The ticket of a new entry.
void* add_handle(std::shared_ptr<HandleEntry> entry);
// Throws Refused: FERRY_BAD_HANDLE.
std::shared_ptr<HandleEntry> find_handle(const void* handle, HandleKind kind);
// No call finds it from now on.
void remove_handle(const void* handle);
// Kept until the process ends: nobody knows what its destructor would meet.
void abandon(std::shared_ptr<void> object);
// Holds an entry during a call. Throws Refused, FERRY_BUSY, within a callback of a call on it: on
// the thread of that call, or in an InCallback of the object.
class Call {
public:
    explicit Call(HandleEntry& entry);
    ~Call();
    Call(const Call&) = delete;
    Call& operator=(const Call&) = delete;

private:
    HandleEntry& entry_;
};
// Throws Refused: closed since it was found, or poisoned.
void check_usable(const HandleEntry& entry, bool also_poisoned = false);

template <class Object, class C>
void hand_out(C** handle, std::unique_ptr<Object> object) {
    auto entry =
        std::make_shared<HandleEntry>(Object::kKind, std::shared_ptr<void>(std::move(object)));
    *handle = static_cast<C*>(add_handle(std::move(entry)));
}

// Runs body(object), and poisons the handle of one in which a bug was found. Errors of the
// world leave the object as usable as its contract says.
template <class Object, class Body>
auto use(HandleEntry& entry, const Body& body) {
    check_usable(entry);
    try {
        return body(*static_cast<Object*>(entry.object.get()));
    } catch (const Refused&) {
        throw;
    } catch (const Error& error) {
        if (error.trouble() == Trouble::internal) entry.poisoned = true;
        throw;
    } catch (const std::bad_alloc&) {
        throw;
    } catch (...) {
        entry.poisoned = true;
        throw;
    }
}

// One call at a time on a handle.
template <class Object, class Body>
ferry_status with(const char* function, const void* handle, const Body& body) noexcept {
    return guarded(function, [&] {
        const std::shared_ptr<HandleEntry> entry = find_handle(handle, Object::kKind);
        const Call call(*entry);
        return use<Object>(*entry, body);
    });
}

// Any number of calls at a time, for objects that allow it.
template <class Object>
std::shared_ptr<Object> shared_object(const void* handle) {
    const std::shared_ptr<HandleEntry> entry = find_handle(handle, Object::kKind);
    const Call call(*entry);
    check_usable(*entry);
    return std::static_pointer_cast<Object>(entry->object);
}

// `check(object)` may refuse; it is not asked of one that is poisoned. Waits for a call that is
// under way.
template <class Object, class Check>
ferry_status close_handle(const char* function, const void* handle, const Check& check) noexcept {
    return guarded(function, [&] {
        const std::shared_ptr<HandleEntry> entry = find_handle(handle, Object::kKind);
        const Call call(*entry);
        check_usable(*entry, true);
        if (!entry->poisoned) use<Object>(*entry, check);
        remove_handle(handle);
        if (entry->poisoned) abandon(entry->object);
        entry->object.reset();
    });
}
template <class Object>
ferry_status close_handle(const char* function, const void* handle) noexcept {
    return close_handle<Object>(function, handle, [](Object&) {});
}

}  // namespace ferry::capi
