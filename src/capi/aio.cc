// A volume and the executor that it stands on.
#include "ferry/aio.h"

#include <algorithm>
#include <memory>
#include <unordered_map>

#include "handles.h"
#include "options.h"
#include "pollable.h"
#include "transfers.h"

namespace ferry::capi {
namespace {

struct Slot {
    int32_t slot_class = 0;
    int transfers = 0;  // submitted and not yet polled
};

struct Aio {
    static constexpr HandleKind kKind = HandleKind::aio;
    // Destroyed from below: the volume waits for what it was given.
    std::unique_ptr<PollableExecutor> executor = std::make_unique<PollableExecutor>();
    std::vector<aio::Operation> transfers{};
    std::vector<aio::Operation*> free{};
    std::unordered_map<aio::SlotId, Slot> slots{};
    size_t paths = 0;
    int32_t classes = 0;
    std::unique_ptr<aio::Volume> volume{};
};

aio::VolumeOptions volume_options(const ferry_aio_options& given) {
    aio::VolumeOptions options{.paths = paths_of(given.paths, given.path_count),
                               .backend = backend_of(given.backend)};
    check_range("class_count", static_cast<int64_t>(std::min<size_t>(given.class_count, 1 << 20)),
                0, 1 << 16);
    for (size_t i = 0; i < given.class_count; ++i) {
        const ferry_slot_class one = element("classes", given.classes, i);
        options.classes.push_back({.name = one.name ? one.name : "slots",
                                   .slot_bytes = one.slot_bytes,
                                   .slots = one.slots});
    }
    check_choice("buffered", given.buffered, 1);
    check_choice("no_layout", given.no_layout, 1);
    if (given.block_bytes) options.block_bytes = given.block_bytes;
    if (given.queue_depth) options.queue_depth = given.queue_depth;
    if (given.operations_max) options.operations_max = given.operations_max;
    if (given.rings) options.rings = given.rings;
    options.direct = given.buffered == 0;
    options.write_once = given.no_layout == 0;
    return options;
}

std::unique_ptr<Aio> open(const ferry_aio_options& given) {
    aio::VolumeOptions options = volume_options(given);
    auto made = std::make_unique<Aio>();
    const int operations = options.operations_max;
    made->paths = options.paths.size();
    made->classes = static_cast<int32_t>(options.classes.size());
    made->volume = aio::Volume::open(std::move(options), *made->executor);
    made->transfers.resize(static_cast<size_t>(operations));
    for (aio::Operation& transfer : made->transfers) made->free.push_back(&transfer);
    return made;
}

Slot& slot_of(Aio& aio, uint32_t id) {
    const auto found = aio.slots.find(id);
    if (found == aio.slots.end())
        refuse_argument("the slot is not allocated", std::to_string(id),
                        std::to_string(aio.slots.size()) + " slots that are");
    return found->second;
}

void check_class(const Aio& aio, int32_t slot_class) {
    check_range("slot_class", slot_class, 0, aio.classes - 1);
}

void check_reach(const Aio& aio, const Slot& slot, int64_t offset, const void* buffer,
                 int64_t bytes) {
    const int64_t slot_bytes = aio.volume->slot_bytes(slot.slot_class);
    check_range("bytes", bytes, 1, slot_bytes);
    check_range("offset", offset, 0, slot_bytes - bytes);
    const int64_t alignment = aio.volume->alignment();
    const auto address = static_cast<int64_t>(reinterpret_cast<uintptr_t>(buffer) %
                                              static_cast<uintptr_t>(alignment));
    for (const auto& [name, value] : {std::pair{"the buffer's address", address},
                                      std::pair{"offset", offset}, std::pair{"bytes", bytes}}) {
        if (value % alignment != 0)
            refuse_argument(std::string(name) + " is not aligned",
                            std::to_string(value % alignment) + " bytes too many",
                            "multiples of " + std::to_string(alignment));
    }
}

ferry_status submit(Aio& aio, const aio::Operation& operation) {
    Slot& slot = slot_of(aio, operation.slot);
    check_reach(aio, slot, operation.offset, operation.buffer.data(), std::ssize(operation.buffer));
    const ferry_status status = submit_one(*aio.volume, aio.free, operation);
    if (status == FERRY_OK) ++slot.transfers;
    return status;
}

ferry_status transfer(const char* function, ferry_aio* handle, aio::Kind kind, uint32_t slot,
                      int64_t offset, void* buffer, int64_t bytes, int32_t priority, uint64_t tag) {
    return with<Aio>(function, handle, [&](Aio& aio) {
        return submit(aio, operation_of(kind, slot, offset, buffer, bytes, priority, tag));
    });
}

void complete(const char* function, Aio& aio, aio::Operation& operation,
              ferry_completion* completion) {
    give_outcome(function, *aio.volume, operation, completion);
    --aio.slots.at(operation.slot).transfers;
    aio.free.push_back(&operation);
}

}  // namespace
}  // namespace ferry::capi

using namespace ferry::capi;
using ferry::aio::Operation;

ferry_status ferry_aio_open(const ferry_aio_options* options, ferry_aio** aio) {
    return guarded(__func__, [&] {
        const ferry_aio_options given = taken("options", options);
        check_given("aio", aio);
        hand_out(aio, open(given));
    });
}

ferry_status ferry_aio_close(ferry_aio* aio) { return close_handle<Aio>(__func__, aio); }

ferry_status ferry_aio_alignment(ferry_aio* aio, int64_t* bytes) {
    return with<Aio>(__func__, aio, [&](Aio& mine) {
        check_given("bytes", bytes);
        *bytes = mine.volume->alignment();
    });
}

ferry_status ferry_aio_slot_bytes(ferry_aio* aio, int32_t slot_class, int64_t* bytes) {
    return with<Aio>(__func__, aio, [&](Aio& mine) {
        check_given("bytes", bytes);
        check_class(mine, slot_class);
        *bytes = mine.volume->slot_bytes(slot_class);
    });
}

ferry_status ferry_aio_allocate(ferry_aio* aio, int32_t slot_class, uint32_t* slot) {
    return with<Aio>(__func__, aio, [&](Aio& mine) {
        check_given("slot", slot);
        check_class(mine, slot_class);
        mine.slots.reserve(mine.slots.size() + 1);
        const ferry::aio::SlotId id = mine.volume->allocate(slot_class);
        if (id == ferry::aio::kNoSlot) return FERRY_AGAIN;
        mine.slots[id] = {.slot_class = slot_class};
        *slot = id;
        return FERRY_OK;
    });
}

ferry_status ferry_aio_free(ferry_aio* aio, uint32_t slot) {
    return with<Aio>(__func__, aio, [&](Aio& mine) {
        if (const int transfers = slot_of(mine, slot).transfers; transfers > 0)
            refuse_argument("transfers of the slot have not been polled", std::to_string(transfers),
                            "0");
        mine.volume->free(slot);
        mine.slots.erase(slot);
    });
}

ferry_status ferry_aio_read(ferry_aio* aio, uint32_t slot, int64_t offset, void* buffer,
                            int64_t bytes, int32_t priority, uint64_t tag) {
    return transfer(__func__, aio, ferry::aio::Kind::read, slot, offset, buffer, bytes, priority,
                    tag);
}

ferry_status ferry_aio_write(ferry_aio* aio, uint32_t slot, int64_t offset, const void* buffer,
                             int64_t bytes, int32_t priority, uint64_t tag) {
    return transfer(__func__, aio, ferry::aio::Kind::write, slot, offset,
                    const_cast<void*>(buffer),  // NOLINT: it is only read
                    bytes, priority, tag);
}

ferry_status ferry_aio_poll(ferry_aio* aio, ferry_completion* completion) {
    return ferry_aio_wait(aio, 0, completion);
}

ferry_status ferry_aio_wait(ferry_aio* aio, int64_t timeout_ms, ferry_completion* completion) {
    return with<Aio>(__func__, aio, [&](Aio& mine) {
        check_size("completion", completion);
        Operation* const operation = wait_for_one(*mine.volume, *mine.executor, timeout_ms);
        if (operation == nullptr) return FERRY_AGAIN;
        complete("ferry_aio_wait", mine, *operation, completion);
        return FERRY_OK;
    });
}

ferry_status ferry_aio_descriptor(ferry_aio* aio, int32_t* descriptor) {
    return with<Aio>(__func__, aio, [&](Aio& mine) {
        check_given("descriptor", descriptor);
        *descriptor = mine.executor->descriptor();
    });
}

ferry_status ferry_aio_cancel(ferry_aio* aio) {
    return with<Aio>(__func__, aio, [](Aio& mine) { mine.volume->cancel_queued(); });
}

ferry_status ferry_aio_in_flight(ferry_aio* aio, int32_t* transfers) {
    return with<Aio>(__func__, aio, [&](Aio& mine) {
        check_given("transfers", transfers);
        *transfers = mine.volume->in_flight();
    });
}

ferry_status ferry_aio_flush(ferry_aio* aio) {
    return with<Aio>(__func__, aio, [](Aio& mine) { mine.volume->flush(); });
}

ferry_status ferry_aio_stats(ferry_aio* aio, size_t path, ferry_path_stats* stats) {
    return with<Aio>(__func__, aio, [&](Aio& mine) {
        check_size("stats", stats);
        check_range("path", static_cast<int64_t>(std::min<size_t>(path, 1 << 20)), 0,
                    static_cast<int64_t>(mine.paths) - 1);
        const ferry::aio::PathCounters counters = mine.volume->counters()[path];
        give<ferry_path_stats>(stats, {.size = 0,
                                       .bytes_read = counters.bytes_read,
                                       .bytes_written = counters.bytes_written,
                                       .bytes_overhead = counters.bytes_overhead,
                                       .reads = counters.reads,
                                       .writes = counters.writes,
                                       .retries = counters.retries,
                                       .errors = counters.errors,
                                       .read_bytes_per_s = counters.read_bytes_per_s,
                                       .write_bytes_per_s = counters.write_bytes_per_s,
                                       .endurance_used = counters.endurance_used});
    });
}
