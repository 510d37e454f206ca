#include "object_table.h"

namespace ferry::swap {

std::string_view name_of(Tier tier) {
    static constexpr std::string_view kNames[] = {"device", "host", "nvme"};
    return kNames[static_cast<size_t>(tier)];
}

ObjectTable::ObjectTable(const StoreOptions& options, Device& device, aio::Volume* volume)
    : objects_(options.objects),
      entries_(options.objects.size()),
      host_arena_(options.host_arena),
      device_memory_(device.memory()),
      volume_(volume) {
    for (const HostSlots& slots : options.host_slots) {
        auto& free = free_host_slots_.emplace_back();
        for (int64_t i = slots.slots - 1; i >= 0; --i)
            free.push_back(host_arena_.data() + slots.offset + i * slots.slot_bytes);
    }
    int64_t sums = 0;
    for (size_t id = 0; id < objects_.size(); ++id) {
        if (objects_[id].home != Tier::nvme) continue;
        FERRY_CHECK(volume_, "an object on NVMe needs a volume");
        entries_[id].first_sum = sums;
        entries_[id].pieces = aio::pieces_of(objects_[id].bytes);
        sums += entries_[id].pieces * (objects_[id].versioned ? 2 : 1);
    }
    sums_.resize(static_cast<size_t>(sums));
}

void ObjectTable::place_initially(ObjectId id) {
    const Object& object = objects_[id];
    Versions& entry = entries_[id];
    if (object.home == Tier::nvme) {
        entry.slot[0] = volume_->allocate(object.slot_class);
        FERRY_CHECK(entry.slot[0] != aio::kNoSlot, "the plan has a slot for every object");
    } else if (object.versioned) {
        auto& free = free_host_slots(object);
        FERRY_CHECK(!free.empty(), "the plan has a host slot for every object");
        entry.address[0] = free.back();
        free.pop_back();
    } else {
        const auto arena = object.home == Tier::device ? device_memory_ : host_arena_;
        entry.address[0] = arena.data() + object.offset;
    }
}

std::byte* ObjectTable::current_address(ObjectId id) {
    return entries_[id].address[entries_[id].current];
}

bool ObjectTable::reserve_fresh_address(ObjectId id) {
    Versions& entry = entries_[id];
    if (entry.pending) return true;
    auto& free = free_host_slots(objects_[id]);
    if (free.empty()) return false;
    entry.address[1 - entry.current] = free.back();
    free.pop_back();
    entry.pending = true;
    return true;
}

std::byte* ObjectTable::fresh_address(ObjectId id) {
    return entries_[id].address[1 - entries_[id].current];
}

std::optional<aio::SlotId> ObjectTable::slot_for_write(ObjectId id) {
    Versions& entry = entries_[id];
    const Object& object = objects_[id];
    if (!object.versioned) return entry.slot[0];
    FERRY_CHECK(!entry.pending, "one pending version at a time");
    const aio::SlotId fresh = volume_->allocate(object.slot_class);
    if (fresh == aio::kNoSlot) return std::nullopt;
    entry.slot[1 - entry.current] = fresh;
    entry.pending = true;
    return fresh;
}

void ObjectTable::release(ObjectId id, size_t side) {
    Versions& entry = entries_[id];
    if (entry.slot[side] != aio::kNoSlot) volume_->free(entry.slot[side]);
    if (entry.address[side]) free_host_slots(objects_[id]).push_back(entry.address[side]);
    entry.slot[side] = aio::kNoSlot;
    entry.address[side] = nullptr;
    entry.pending = false;
}

void ObjectTable::commit(ObjectId id) {
    Versions& entry = entries_[id];
    FERRY_CHECK(entry.pending, "commit without a pending version");
    release(id, entry.current);
    entry.current = static_cast<uint8_t>(1 - entry.current);
}

void ObjectTable::rollback(ObjectId id) {
    Versions& entry = entries_[id];
    FERRY_CHECK(entry.pending, "rollback without a pending version");
    release(id, 1 - entry.current);
}

uint64_t ObjectTable::seed_of(ObjectId id, uint64_t version) const {
    return (uint64_t{id} << 40) ^ version;
}

void ObjectTable::seal(ObjectId id, std::span<const std::byte> bytes) noexcept {
    Versions& entry = entries_[id];
    const size_t side = target(entry, objects_[id]);
    entry.version[side] = ++entry.newest;
    const auto first =
        static_cast<size_t>(entry.first_sum) + side * static_cast<size_t>(entry.pieces);
    aio::seal(bytes, seed_of(id, entry.version[side]),
              std::span(sums_).subspan(first, static_cast<size_t>(entry.pieces)));
}

int64_t ObjectTable::verify(ObjectId id, std::span<const std::byte> bytes) const noexcept {
    const Versions& entry = entries_[id];
    const size_t side = entry.current;
    const auto first =
        static_cast<size_t>(entry.first_sum) + side * static_cast<size_t>(entry.pieces);
    return aio::verify(bytes, seed_of(id, entry.version[side]),
                       std::span(sums_).subspan(first, static_cast<size_t>(entry.pieces)));
}

}  // namespace ferry::swap
