#include "lease_options.h"

#include <algorithm>
#include <utility>

namespace ferry::swap {
namespace {

void refuse(Trouble trouble, std::string what, ObjectId id, int64_t measured, std::string limit) {
    throw Error(trouble, {.what = std::move(what),
                          .where = id == kNoObject ? "" : object_name(id),
                          .measured = std::to_string(measured) + " bytes",
                          .limit = std::move(limit)});
}

void check_home(const LeasedStoreOptions& options, ObjectId id, const aio::Volume* volume) {
    const LeasedObject& object = options.objects[id];
    if (object.bytes <= 0)
        refuse(Trouble::usage, "an object has no bytes", id, object.bytes, "at least 1");
    if (object.home == Home::host) {
        const int64_t arena = std::ssize(options.host_arena);
        if (object.offset < 0 || object.offset > arena || object.bytes > arena - object.offset)
            refuse(Trouble::usage,
                   "an object does not lie in the host arena, at " + std::to_string(object.offset),
                   id, object.bytes, std::to_string(arena) + " bytes of arena");
        return;
    }
    if (!volume || object.slot_class < 0)
        throw Error(Trouble::usage, {.what = "an object on NVMe needs a volume and a slot class",
                                     .where = object_name(id)});
    if (const int64_t slot = volume->slot_bytes(object.slot_class); object.bytes > slot)
        refuse(Trouble::usage, "an object does not fit into a slot of its class", id, object.bytes,
               std::to_string(slot) + " bytes");
}

void check_buffers(const LeasedStoreOptions& options, int64_t largest, int64_t alignment) {
    const auto address = static_cast<int64_t>(reinterpret_cast<uintptr_t>(options.buffers.data()));
    if (largest > options.buffer_bytes)
        refuse(Trouble::usage, "the largest object does not fit into a buffer", kNoObject, largest,
               std::to_string(options.buffer_bytes) + " bytes (buffer_bytes)");
    if (options.spare_buffers < 0)
        throw Error(Trouble::usage, {.what = "spare_buffers is negative",
                                     .measured = std::to_string(options.spare_buffers),
                                     .limit = "0 (a quarter of the buffers) or more"});
    const std::string multiple = "multiples of " + std::to_string(alignment);
    if (options.buffer_bytes % alignment != 0)
        refuse(Trouble::usage, "buffer_bytes is not aligned as the volume needs it", kNoObject,
               options.buffer_bytes, multiple);
    if (address % alignment != 0)
        refuse(Trouble::usage, "the buffers do not start where the volume needs it", kNoObject,
               address % alignment, multiple);
    if (std::ssize(options.buffers) < options.buffer_bytes)
        refuse(Trouble::does_not_fit, "there is no room for a single buffer", kNoObject,
               std::ssize(options.buffers), std::to_string(options.buffer_bytes) + " bytes");
}

// A slot for each object of a class and one for a version on its way: with these every write gets
// its turn.
void prove_slots(const std::vector<LeasedObject>& objects, aio::Volume& volume) {
    int classes = 0;
    for (const LeasedObject& object : objects) classes = std::max(classes, object.slot_class + 1);
    std::vector<aio::SlotId> slots;
    for (int c = 0; c < classes; ++c) {
        const auto mine = std::ranges::count_if(
            objects, [&](const LeasedObject& o) { return on_nvme(o) && o.slot_class == c; });
        if (mine == 0) continue;
        while (std::ssize(slots) <= mine) {
            const aio::SlotId slot = volume.allocate(c);
            if (slot == aio::kNoSlot) break;
            slots.push_back(slot);
        }
        const int64_t found = std::ssize(slots);
        for (const aio::SlotId slot : slots) volume.free(slot);
        slots.clear();
        if (found <= mine)
            throw Error(Trouble::does_not_fit,
                        {.what = "the volume has too few slots for these objects",
                         .where = "slot class " + std::to_string(c),
                         .measured = std::to_string(found) + " free slots",
                         .limit = std::to_string(mine + 1) + ": one for each object, and one more",
                         .remedy = "give the class more slots (aio::SlotClass)"});
    }
}

}  // namespace

void complete(LeasedStoreOptions& options, aio::Volume* volume) {
    int64_t largest = 0;
    for (size_t id = 0; id < options.objects.size(); ++id) {
        check_home(options, static_cast<ObjectId>(id), volume);
        const LeasedObject& object = options.objects[id];
        if (on_nvme(object)) largest = std::max(largest, object.bytes);
    }
    if (largest == 0) return;
    const int64_t alignment = volume->alignment();
    if (options.buffer_bytes == 0) options.buffer_bytes = round_up(largest, alignment);
    check_buffers(options, largest, alignment);
    prove_slots(options.objects, *volume);
}

}  // namespace ferry::swap
