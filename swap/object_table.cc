#include "object_table.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <functional>
#include <utility>

namespace ferry::swap {
namespace {

// The map: one of these for each versioned object on NVMe, in order, and behind each the checksums
// of its pieces.
struct MapEntry {
    ObjectId object;
    aio::SlotId slot;
    uint64_t version;
    int64_t bytes;
};

bool outlives(const Object& object) { return object.home == Tier::nvme && object.versioned; }
size_t map_bytes_of(int64_t object_bytes) {
    return sizeof(MapEntry) + static_cast<size_t>(aio::pieces_of(object_bytes)) * sizeof(uint64_t);
}

}  // namespace

int64_t map_bytes(std::span<const Object> objects) {
    size_t bytes = 0;
    for (const Object& object : objects) bytes += outlives(object) ? map_bytes_of(object.bytes) : 0;
    return static_cast<int64_t>(bytes);
}

std::string_view name_of(Tier tier) {
    static constexpr std::string_view kNames[] = {"device", "host", "nvme"};
    return kNames[static_cast<size_t>(tier)];
}

ObjectTable::ObjectTable(Objects objects, std::span<std::byte> device_memory, aio::Volume* volume)
    : objects_(std::move(objects.objects)),
      entries_(objects_.size()),
      host_arena_(objects.host_arena),
      device_memory_(device_memory),
      volume_(volume),
      parallel_(std::move(objects.parallel)) {
    for (const HostSlots& slots : objects.host_slots) {
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
        if (outlives(objects_[id])) durable_.push_back(static_cast<ObjectId>(id));
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

aio::Operation ObjectTable::read_into(ObjectId id, std::span<std::byte> buffer) const {
    return {.kind = aio::Kind::read,
            .priority = aio::Priority::urgent,
            .slot = current_slot(id),
            .buffer = buffer};
}

std::optional<aio::Operation> ObjectTable::write_from(ObjectId id, std::span<std::byte> buffer) {
    Versions& entry = entries_[id];
    const Object& object = objects_[id];
    if (object.versioned) {
        FERRY_CHECK(!entry.pending, "one pending version at a time");
        const aio::SlotId fresh = volume_->allocate(object.slot_class);
        if (fresh == aio::kNoSlot) return std::nullopt;
        entry.slot[1 - entry.current] = fresh;
        entry.pending = true;
    }
    return aio::Operation{.kind = aio::Kind::write,
                          .priority = aio::Priority::normal,
                          .slot = entry.slot[target(entry, object)],
                          .buffer = buffer};
}

void ObjectTable::release(ObjectId id, size_t side) {
    Versions& entry = entries_[id];
    const aio::SlotId slot = entry.slot[side];
    const bool named = slot == entry.durable || slot == entry.publishing;  // by a map
    if (slot != aio::kNoSlot && !named) volume_->free(slot);
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

// ---------------------------------------------------------------- what outlives the process

void ObjectTable::begin_publication(std::span<std::byte> map) {
    for (const ObjectId id : durable_) {
        Versions& entry = entries_[id];
        const size_t side = entry.current;
        entry.publishing = entry.slot[side];
        const MapEntry made{id, entry.slot[side], entry.version[side], objects_[id].bytes};
        const auto sums = std::as_bytes(sums_of(entry, side));
        std::memcpy(map.data(), &made, sizeof made);
        std::memcpy(map.data() + sizeof made, sums.data(), sums.size());
        map = map.subspan(sizeof made + sums.size());
    }
}

void ObjectTable::end_publication() {
    for (const ObjectId id : durable_) {
        Versions& entry = entries_[id];
        const aio::SlotId before = std::exchange(entry.durable, entry.publishing);
        entry.publishing = aio::kNoSlot;
        const bool in_use = before == entry.durable || before == entry.slot[0] ||
                            before == entry.slot[1] || before == aio::kNoSlot;
        if (!in_use) volume_->free(before);
    }
}

void ObjectTable::free_slots_of(Versions& entry) {
    std::array<aio::SlotId, 3> slots{entry.slot[0], entry.slot[1], entry.durable};
    std::sort(slots.begin(), slots.end());
    for (auto end = std::unique(slots.begin(), slots.end()), slot = slots.begin(); slot != end;
         ++slot)
        if (*slot != aio::kNoSlot) volume_->free(*slot);
    entry.slot.fill(aio::kNoSlot);
    entry.durable = aio::kNoSlot;
}

void ObjectTable::free_slots() {
    for (Versions& entry : entries_) free_slots_of(entry);
}

bool ObjectTable::restore(std::span<const std::byte> map) {
    free_slots();
    std::vector<aio::SlotId> slots;
    for (const ObjectId id : durable_) {
        Versions& entry = entries_[id];
        MapEntry named{};
        if (map.size() < map_bytes_of(objects_[id].bytes)) return false;
        std::memcpy(&named, map.data(), sizeof named);
        if (named.object != id || named.bytes != objects_[id].bytes) return false;
        const auto sums = std::as_writable_bytes(sums_of(entry, 0));
        std::memcpy(sums.data(), map.data() + sizeof named, sums.size());
        map = map.subspan(sizeof named + sums.size());
        slots.push_back(named.slot);
        entry.current = 0;
        entry.version[0] = entry.newest = named.version;
    }
    if (!take_slots(slots)) return false;
    // Everything else on NVMe goes where there is room now.
    for (size_t id = 0; id < objects_.size(); ++id)
        if (objects_[id].home == Tier::nvme && !objects_[id].versioned)
            place_initially(static_cast<ObjectId>(id));
    return true;
}

// By class, all or none.
bool ObjectTable::take_slots(std::span<const aio::SlotId> slots) {
    int classes = 0;
    for (const ObjectId id : durable_) classes = std::max(classes, objects_[id].slot_class + 1);
    bool taken = true;
    for (int c = 0; c < classes && taken; ++c) {
        std::vector<aio::SlotId> wanted;
        for (size_t i = 0; i < durable_.size(); ++i)
            if (objects_[durable_[i]].slot_class == c) wanted.push_back(slots[i]);
        taken = volume_->take(c, wanted);
        for (size_t i = 0; i < durable_.size() && taken; ++i) {
            Versions& entry = entries_[durable_[i]];
            if (objects_[durable_[i]].slot_class == c) entry.slot[0] = entry.durable = slots[i];
        }
    }
    return taken;
}

uint64_t ObjectTable::seed_of(ObjectId id, uint64_t version) const {
    return (uint64_t{id} << 40) ^ version;
}

std::string ObjectTable::whose(ObjectId id) const {
    const int layer = id == kNoObject ? -1 : objects_[id].layer;
    return layer < 0 ? "" : ", of layer " + std::to_string(layer);
}

Error ObjectTable::to_error(ObjectId id, const aio::Operation& failed) const {
    const Error error = aio::to_error(*volume_, failed);
    Problem problem = error.problem();
    problem.where += whose(id);
    return {error.trouble(), std::move(problem)};
}

Error ObjectTable::wrong_bytes(ObjectId id, int64_t piece) const {
    return {Trouble::io,
            {.what = "bytes read back from NVMe are not those written",
             .where = volume_->describe(current_slot(id)) + ", piece " + std::to_string(piece) +
                      " of 256 KiB" + whose(id),
             .measured = "checksum mismatch",
             .remedy = "the drive, cable or memory corrupted data: check its health; nothing was "
                       "computed from these bytes"}};
}

template <class Body>
void ObjectTable::for_each_piece(std::span<const std::byte> bytes, const Body& body) const {
    const int64_t pieces = aio::pieces_of(std::ssize(bytes));
    const auto one = [&](int64_t piece) {
        const auto at = static_cast<size_t>(piece * aio::kPieceBytes);
        body(piece, bytes.subspan(at, std::min<size_t>(aio::kPieceBytes, bytes.size() - at)));
    };
    // By reference: nothing is allocated.
    if (parallel_ && pieces > 1) return parallel_(pieces, std::ref(one));
    for (int64_t piece = 0; piece < pieces; ++piece) one(piece);
}

void ObjectTable::seal(ObjectId id, std::span<const std::byte> bytes) noexcept {
    Versions& entry = entries_[id];
    const size_t side = target(entry, objects_[id]);
    entry.version[side] = ++entry.newest;
    const uint64_t seed = seed_of(id, entry.version[side]);
    const std::span<uint64_t> sums = sums_of(entry, side);
    FERRY_CHECK(std::ssize(sums) == aio::pieces_of(std::ssize(bytes)));
    for_each_piece(bytes, [&](int64_t piece, std::span<const std::byte> part) {
        aio::seal(part, seed, sums.subspan(static_cast<size_t>(piece), 1));
    });
}

int64_t ObjectTable::verify(ObjectId id, std::span<const std::byte> bytes) const noexcept {
    const Versions& entry = entries_[id];
    const size_t side = entry.current;
    const uint64_t seed = seed_of(id, entry.version[side]);
    const std::span<const uint64_t> sums = sums_of(entry, side);
    FERRY_CHECK(std::ssize(sums) == aio::pieces_of(std::ssize(bytes)));
    const int64_t none = std::ssize(sums);
    std::atomic<int64_t> wrong = none;
    for_each_piece(bytes, [&](int64_t piece, std::span<const std::byte> part) {
        if (aio::verify(part, seed, sums.subspan(static_cast<size_t>(piece), 1)) < 0) return;
        for (int64_t first = wrong; piece < first && !wrong.compare_exchange_weak(first, piece);) {
        }
    });
    return wrong < none ? wrong.load() : -1;
}

}  // namespace ferry::swap
