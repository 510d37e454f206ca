#include "extents.h"

#include <algorithm>
#include <cmath>
#include <numeric>

namespace ferry::aio {
namespace {

// More than any storage has; sums of two such sizes still fit.
constexpr int64_t kBytesMax = int64_t{1} << 60;

// Bytes of all slots that there may be; checked, so that nothing after it can overflow.
int64_t bytes_of(std::span<const SlotClass> classes, std::span<const int64_t> slot_bytes) {
    int64_t all = 0;
    for (size_t c = 0; c < classes.size(); ++c) {
        int64_t bytes = 0;
        if (!__builtin_mul_overflow(classes[c].slots, slot_bytes[c], &bytes) &&
            !__builtin_add_overflow(all, bytes, &all) && all <= kBytesMax)
            continue;
        throw Error(Trouble::does_not_fit,
                    {.what = "the slots are larger than any storage",
                     .where = "slots \"" + classes[c].name + "\"",
                     .measured = std::to_string(classes[c].slots) + " slots of " +
                                 std::to_string(slot_bytes[c]) + " bytes",
                     .limit = std::to_string(kBytesMax) + " bytes in all",
                     .remedy = "ask for fewer or smaller slots"});
    }
    return all;
}

// How many of `slots` slots go to each path: by speed among the paths that still have room.
std::vector<int64_t> share(int64_t slots, int64_t slot_bytes, std::span<const PathShape> paths,
                           std::span<const int64_t> room_bytes) {
    std::vector<int64_t> given(paths.size());
    while (slots > 0) {
        // Always to the path that would finish its share first: exact, and small numbers of slots
        // come out as evenly as large ones. Whole batches keep it quick for millions of slots.
        double speed = 0;
        for (size_t p = 0; p < paths.size(); ++p)
            if (room_bytes[p] / slot_bytes > given[p]) speed += paths[p].speed;
        if (speed == 0) break;
        int64_t dealt = 0;
        for (size_t p = 0; p < paths.size(); ++p) {
            const int64_t room = room_bytes[p] / slot_bytes - given[p];
            const auto part =
                static_cast<int64_t>(static_cast<double>(slots) * paths[p].speed / speed);
            const int64_t some = std::clamp<int64_t>(part, 0, std::min(room, slots - dealt));
            given[p] += some;
            dealt += some;
        }
        if (dealt == 0) {
            size_t best = paths.size();
            const auto finish = [&](size_t p) {
                return static_cast<double>(given[p] + 1) / paths[p].speed;
            };
            for (size_t p = 0; p < paths.size(); ++p) {
                if (room_bytes[p] / slot_bytes <= given[p]) continue;
                if (best == paths.size() || finish(p) < finish(best)) best = p;
            }
            ++given[best];
            dealt = 1;
        }
        slots -= dealt;
    }
    return given;
}

}  // namespace

Extents::Extents(std::span<const SlotClass> classes, std::span<const PathShape> paths,
                 int64_t alignment, double slack, std::vector<PerPath> counts)
    : counts_(std::move(counts)) {
    for (const PathShape& path : paths) {
        speed_.push_back(path.speed);
        file_bytes_.emplace_back(static_cast<size_t>(path.files), path.data_offset);
    }
    for (const SlotClass& one : classes) slot_bytes_.push_back(round_up(one.slot_bytes, alignment));
    reserved_bytes_ = bytes_of(classes, slot_bytes_);
    pools_.resize(classes.size() * paths.size());
    if (counts_.empty()) counts_ = divide(classes, paths, slack);
    int64_t slots = 0;
    for (const PerPath& count : counts_) slots = std::accumulate(count.begin(), count.end(), slots);
    for (const SlotClass& one : classes) unused_.push_back(one.slots);
    if (slots >= kNoSlot)
        throw Error(Trouble::usage, {.what = "too many storage slots",
                                     .measured = std::to_string(slots),
                                     .limit = std::to_string(kNoSlot - 1),
                                     .remedy = "use larger chunks"});
    places_.reserve(static_cast<size_t>(slots));
    for (size_t c = 0; c < classes.size(); ++c)
        for (size_t p = 0; p < paths.size(); ++p)
            lay_out(static_cast<int>(c), static_cast<int>(p), paths[p], counts_[c][p]);
    used_.resize(places_.size());
}

std::vector<Extents::PerPath> Extents::divide(std::span<const SlotClass> classes,
                                              std::span<const PathShape> paths,
                                              double slack) const {
    std::vector<int64_t> room;
    int64_t capacity = 0;
    for (const PathShape& path : paths) {
        room.push_back(std::min(path.capacity_bytes, kBytesMax));
        capacity = std::min(capacity + room.back(), kBytesMax);
    }
    std::vector<PerPath> counts;
    int64_t missing = 0, largest = 0;
    for (size_t c = 0; c < classes.size(); ++c) {
        counts.push_back(share(classes[c].slots, slot_bytes_[c], paths, room));
        int64_t placed = 0;
        for (size_t p = 0; p < paths.size(); ++p) {
            room[p] -= counts[c][p] * slot_bytes_[c];
            placed += counts[c][p];
        }
        largest = std::max(largest, slot_bytes_[c]);
        missing += (classes[c].slots - placed) * slot_bytes_[c];
    }
    // A slot lies on one path: what is left at the end of each may be too small for one.
    const int64_t enough = reserved_bytes_ + (static_cast<int64_t>(paths.size()) - 1) * largest;
    std::string names;
    for (const PathShape& path : paths) names += (names.empty() ? "" : ", ") + path.name;
    if (missing > 0)
        throw Error(Trouble::does_not_fit,
                    {.what = "the storage paths are too small: " + std::to_string(missing) +
                             " bytes (" + format_bytes(missing) + ") are missing",
                     .where = names,
                     .measured = std::to_string(reserved_bytes_) + " bytes needed",
                     .limit = std::to_string(capacity) + " bytes given",
                     .remedy = "give the paths " + std::to_string(enough) +
                               " bytes in all, or add a path"});
    if (paths.size() < 2) return counts;
    for (size_t c = 0; c < classes.size(); ++c) {
        for (size_t p = 0; p < paths.size(); ++p) {
            const auto wanted = std::ceil(slack * static_cast<double>(counts[c][p]));
            const int64_t more = std::min(static_cast<int64_t>(wanted), room[p] / slot_bytes_[c]);
            room[p] -= more * slot_bytes_[c];
            counts[c][p] += more;
        }
    }
    return counts;
}

void Extents::lay_out(int slot_class, int path, const PathShape& shape, int64_t count) {
    Pool& mine = pool(slot_class, static_cast<size_t>(path));
    std::vector<int64_t>& ends = file_bytes_[static_cast<size_t>(path)];
    const int64_t bytes = slot_bytes(slot_class);
    for (int64_t i = 0; i < count; ++i) {
        const int64_t file = i % shape.files;
        const int64_t ring = (shape.files >= shape.rings ? file : i) % shape.rings;
        int64_t& end = ends[static_cast<size_t>(file)];
        mine.free.push_back(static_cast<SlotId>(places_.size()));
        places_.push_back({.path = static_cast<uint16_t>(path),
                           .ring = static_cast<uint16_t>(ring),
                           .file = static_cast<uint16_t>(file),
                           .slot_class = static_cast<uint16_t>(slot_class),
                           .offset = end});
        end += bytes;
    }
    // Slots are taken from the back: the first ones first, in file order.
    std::reverse(mine.free.begin(), mine.free.end());
}

void Extents::count_used(int slot_class, int64_t slots) noexcept {
    unused_[static_cast<size_t>(slot_class)] -= slots;
    used_bytes_ += slots * slot_bytes(slot_class);
    peak_bytes_ = std::max(peak_bytes_, used_bytes_);
}

SlotId Extents::allocate(int slot_class) noexcept {
    if (unused_[static_cast<size_t>(slot_class)] == 0) return kNoSlot;
    Pool* best = nullptr;
    double best_load = 0;
    for (size_t p = 0; p < speed_.size(); ++p) {
        Pool& candidate = pool(slot_class, p);
        if (candidate.free.empty()) continue;
        const double load = static_cast<double>(candidate.used + 1) / speed_[p];
        if (!best || load < best_load) best = &candidate, best_load = load;
    }
    if (!best) return kNoSlot;
    const SlotId slot = best->free.back();
    best->free.pop_back();
    ++best->used;
    count_used(slot_class, 1);
    used_[slot] = true;
    return slot;
}

bool Extents::take(int slot_class, std::span<const SlotId> slots) {
    const auto wanted = static_cast<int64_t>(slots.size());
    const int64_t unused = unused_[static_cast<size_t>(slot_class)];
    size_t marked = 0;
    for (; marked < slots.size() && wanted <= unused; ++marked) {
        const SlotId slot = slots[marked];
        if (slot >= places_.size() || places_[slot].slot_class != slot_class || used_[slot]) break;
        used_[slot] = true;
    }
    if (marked < slots.size()) {
        for (const SlotId slot : slots.first(marked)) used_[slot] = false;
        return false;
    }
    for (size_t p = 0; p < speed_.size(); ++p) {
        Pool& mine = pool(slot_class, p);
        mine.used += static_cast<int64_t>(
            std::erase_if(mine.free, [this](SlotId slot) { return used_[slot]; }));
    }
    count_used(slot_class, wanted);
    return true;
}

void Extents::free(SlotId slot) noexcept {
    FERRY_CHECK(slot < places_.size() && used_[slot], "a slot is freed that is not in use");
    Pool& mine = pool(places_[slot].slot_class, places_[slot].path);
    mine.free.push_back(slot);  // its capacity is that of all slots: no allocation
    --mine.used;
    count_used(places_[slot].slot_class, -1);
    used_[slot] = false;
}

}  // namespace ferry::aio
