// Leases: the tiered store by demand, for programs that do not know beforehand in which order they
// use their objects. A leased object of NVMe lies in one of a fixed number of host buffers. It
// stays there until the buffer is needed. examples/leases.cc shows it whole.
//
// Threads: one owner thread, the executor's step thread, makes and calls the store and acquires,
// moves and destroys leases. Any thread may use bytes() meanwhile.
// Memory: all of it is allocated by make(); afterwards only errors are.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "ferry/aio.h"
#include "ferry/executor.h"

namespace ferry::swap {

using ObjectId = uint32_t;
constexpr ObjectId kNoObject = ~ObjectId{0};

enum class Home : uint8_t { host, nvme };

// State of the program's that the store keeps.
struct LeasedObject {
    Home home = Home::host;
    int64_t bytes = 0;
    int64_t offset = 0;   // in host memory: where it begins in host_arena
    int slot_class = -1;  // on NVMe: which of VolumeOptions::classes its slots are of
};

// Calls body(0) to body(count - 1) on several threads; may itself be called by several.
using Parallel = std::function<void(int64_t count, const std::function<void(int64_t)>& body)>;

enum class Access : uint8_t {
    read,       // several at a time; the bytes are not to be changed
    write,      // alone; the bytes are as they were
    overwrite,  // alone; the bytes are anything, and all of them are to be written. Reads nothing
};

class LeasedStore;

// The right to an object's bytes in host memory, from acquire() until it is destroyed.
class Lease {
public:
    Lease() = default;  // an empty lease: it holds nothing
    Lease(Lease&& other) noexcept { swap(other); }
    Lease& operator=(Lease&& other) noexcept {
        Lease(std::move(other)).swap(*this);
        return *this;
    }
    ~Lease() { give_back(); }

    // Does what the destructor does. It never waits or fails. It may start writes, of this object
    // or another, and hash what they write. Where such a write fails, flush(), check() and that
    // object's next acquire() throw. bytes() must no longer be used. What a writer left half done,
    // for instance by an exception, counts as written.
    void give_back() noexcept;
    explicit operator bool() const noexcept { return store_ != nullptr; }
    ObjectId object() const noexcept { return object_; }
    // All of the object. On NVMe's they start at a multiple of the volume's alignment.
    std::span<std::byte> bytes() const noexcept { return bytes_; }

private:
    friend class LeasedStore;
    Lease(LeasedStore& store, ObjectId object, std::span<std::byte> bytes) noexcept
        : store_(&store), object_(object), bytes_(bytes) {}
    void swap(Lease& other) noexcept {
        std::swap(store_, other.store_);
        std::swap(object_, other.object_);
        std::swap(bytes_, other.bytes_);
    }

    LeasedStore* store_ = nullptr;
    ObjectId object_ = kNoObject;
    std::span<std::byte> bytes_{};
};

struct LeasedStoreOptions {
    // An ObjectId is an index of these. A class of slots needs one for each of its objects, and one
    // more. With as many more as there are buffers no write waits for another.
    std::vector<LeasedObject> objects{};
    std::span<std::byte> host_arena{};
    // The caller's memory, page-locked or not (pinned_mem), cut into buffers of buffer_bytes, each
    // for one object of NVMe. Address and buffer_bytes: multiples of the volume's alignment.
    std::span<std::byte> buffers{};
    int64_t buffer_bytes = 0;  // 0: as large as the largest of these objects needs
    // How many buffers the store tries to have free. It writes back ahead of need: of
    // unleased buffers those not used for longest. With more, acquire() finds room sooner. With
    // fewer, what changes often is written less often. 0: a quarter, at least one.
    int64_t spare_buffers = 0;
    bool verify = true;   // checksums: sealed when written, verified when read
    Parallel parallel{};  // optional: hashes
};

// Since make().
struct LeaseReport {
    int64_t acquired = 0;           // leases
    int64_t hits = 0;               // acquisitions without I/O and without a wait
    int64_t reads = 0, writes = 0;  // begun, of whole objects
};

class LeasedStore {
public:
    // Nobody else uses `volume` while the store lives. It may be null when no object lives on NVMe.
    // What is passed must outlive the store. Throws usage or does_not_fit.
    static std::unique_ptr<LeasedStore> make(LeasedStoreOptions options, Executor& executor,
                                             aio::Volume* volume);
    // Waits for what is under way. What was not flushed is not written. All slots are free again:
    // objects on NVMe do not outlive the store. A lease that outlives it is a bug.
    ~LeasedStore();
    LeasedStore(const LeasedStore&) = delete;
    LeasedStore& operator=(const LeasedStore&) = delete;

    // Waits until the object's bytes are in a buffer. For a writer it also waits until no write of
    // the object is under way. It takes the least recently used of the buffers whose contents are
    // written or can be read again. Where there is none, it waits for a write or a read to end.
    // Throws
    //   io            the read failed, or its bytes were not those written: nothing is leased, and
    //                 another acquire() reads again; or an earlier write of this object failed:
    //                 until overwritten or reverted
    //   usage         no such object; it is already leased, and one of the two is for writing;
    //                 nothing was ever written to it and this is no overwrite
    //   does_not_fit  every buffer is held by a lease
    Lease acquire(ObjectId object, Access access);

    // A hint: starts the read if a buffer can be had, else does nothing. It never takes the buffer
    // of another object that was prefetched and is still to be acquired. Never waits. A failed read
    // is not reported: acquire() reads again. Throws usage: no such object.
    void prefetch(ObjectId object);
    void prefetch(std::span<const ObjectId> objects) {  // the first needed first
        for (const ObjectId object : objects) prefetch(object);
    }

    // Writes everything that was changed, except what is leased for writing now. Waits for it, then
    // does check(). Buffers keep their contents.
    void flush();
    // Throws io: the first failed write that was not overwritten or reverted. Never waits.
    void check();
    // After a failed write of an object that is not leased: it has the contents again that were
    // last written without failure. The newer ones are lost. False: there are none.
    bool revert(ObjectId object);

    LeaseReport report() const;

private:
    friend class Lease;
    class Buffers;
    LeasedStore(LeasedStoreOptions options, Executor& executor, aio::Volume* volume);
    void take_back(ObjectId object) noexcept;
    const std::unique_ptr<Buffers> buffers_;
};

inline void Lease::give_back() noexcept {
    bytes_ = {};
    const ObjectId object = std::exchange(object_, kNoObject);
    if (LeasedStore* const store = std::exchange(store_, nullptr)) store->take_back(object);
}

}  // namespace ferry::swap
