// Where each object is: its slots, its versions and the checksums of what lies on NVMe.
#pragma once

#include <array>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "ferry/aio.h"
#include "swap/objects.h"

namespace ferry::swap {

class ObjectTable {
public:
    ObjectTable(Objects objects, std::span<std::byte> device_memory, aio::Volume* volume);

    const Object& object(ObjectId id) const { return objects_[id]; }
    int64_t size() const { return static_cast<int64_t>(objects_.size()); }

    // The address of a version in memory; null for one on NVMe.
    std::byte* current_address(ObjectId id);
    // Gives a versioned host object a slot for its pending version, once; false: none is free.
    bool reserve_fresh_address(ObjectId id);
    std::byte* fresh_address(ObjectId id);

    // The transfers of an object on NVMe, to be submitted: of its current version into a buffer,
    // and of the next one out of it. That goes to a fresh slot for a versioned object, of which it
    // is the pending version then; empty: no slot is free.
    aio::Operation read_into(ObjectId id, std::span<std::byte> buffer) const;
    std::optional<aio::Operation> write_from(ObjectId id, std::span<std::byte> buffer);

    // Ends a pending version one way or the other. A commit without one is a bug.
    void commit(ObjectId id);
    void rollback(ObjectId id);
    // First contents: the object gets its home.
    void place_initially(ObjectId id);
    // Gives every slot on NVMe back: nothing there has contents any more.
    void free_slots();

    // ---- versions that outlive the process: of versioned objects on NVMe
    // Takes down the current ones; none of their slots is freed until another map is durable.
    void begin_publication(std::span<std::byte> map);
    // That map is durable: slots that only the one before named are free.
    void end_publication();
    // The last durable map names the slot of the object's current version.
    bool is_durable(ObjectId id) const noexcept {
        return current_slot(id) != aio::kNoSlot && current_slot(id) == entries_[id].durable;
    }
    // Takes over exactly what a map names. False: it is not of these objects; restore() another.
    bool restore(std::span<const std::byte> map);

    // For errors: that of a transfer, and of a piece that verify() found wrong.
    Error to_error(ObjectId id, const aio::Operation& failed) const;
    Error wrong_bytes(ObjectId id, int64_t piece) const;

    // Both on several threads, by Objects::parallel; without it on the caller's.
    void seal(ObjectId id, std::span<const std::byte> bytes) noexcept;
    // First wrong piece, or -1.
    int64_t verify(ObjectId id, std::span<const std::byte> bytes) const noexcept;

private:
    // Two versions: `current`, and the other one, which a write in flight or a speculative update
    // may hold.
    struct Versions {
        uint8_t current = 0;
        bool pending = false;
        std::array<aio::SlotId, 2> slot{aio::kNoSlot, aio::kNoSlot};
        std::array<std::byte*, 2> address{nullptr, nullptr};
        std::array<uint64_t, 2> version{0, 0};
        uint64_t newest = 0;
        // Named by the last durable map, and by the one that is on its way.
        aio::SlotId durable = aio::kNoSlot, publishing = aio::kNoSlot;
        int64_t first_sum = 0;  // where its sums begin: two runs of `pieces` each
        int64_t pieces = 0;
    };
    aio::SlotId current_slot(ObjectId id) const { return entries_[id].slot[entries_[id].current]; }
    std::string whose(ObjectId id) const;  // ", of layer 3", or nothing
    size_t target(const Versions& entry, const Object& object) const {
        return object.versioned ? 1 - entry.current : entry.current;
    }
    std::vector<std::byte*>& free_host_slots(const Object& object) {
        return free_host_slots_[static_cast<size_t>(object.slot_class)];
    }
    void release(ObjectId id, size_t side);
    void free_slots_of(Versions& entry);
    bool take_slots(std::span<const aio::SlotId> slots);  // one for each of durable_
    std::span<uint64_t> sums_of(const Versions& entry, size_t side) {
        const auto pieces = static_cast<size_t>(entry.pieces);
        return std::span(sums_).subspan(static_cast<size_t>(entry.first_sum) + side * pieces,
                                        pieces);
    }
    std::span<const uint64_t> sums_of(const Versions& entry, size_t side) const {
        return const_cast<ObjectTable*>(this)->sums_of(entry, side);
    }
    uint64_t seed_of(ObjectId id, uint64_t version) const;
    // Calls body(piece, its bytes) for each of them.
    template <class Body>
    void for_each_piece(std::span<const std::byte> bytes, const Body& body) const;

    std::vector<Object> objects_;
    std::vector<Versions> entries_;
    std::vector<uint64_t> sums_;
    std::vector<ObjectId> durable_;                         // versioned, on NVMe
    std::vector<std::vector<std::byte*>> free_host_slots_;  // by class
    std::span<std::byte> host_arena_;
    std::span<std::byte> device_memory_;
    aio::Volume* volume_;
    Parallel parallel_;
};

}  // namespace ferry::swap
