// The leased store, with the memory and the volume that its objects want.
#include "ferry/lease.h"

#include <algorithm>
#include <map>
#include <memory>

#include "handles.h"
#include "host_memory.h"
#include "options.h"

namespace ferry::capi {
namespace {

constexpr int64_t kHostAlignment = 64, kPage = 4096;
constexpr int64_t kObjectBytesMax = int64_t{1} << 42, kObjectsMax = int64_t{1} << 20;

// A lease's number: which place of the list, and how many leases had it before.
struct LeasePlace {
    uint32_t generation = 0;
    swap::Lease lease{};
};

struct Store {
    static constexpr HandleKind kKind = HandleKind::store;
    // As the caller wants it.
    std::vector<aio::PathOptions> paths{};
    HostMemoryOptions host{};
    aio::VolumeOptions volume_options{};
    int64_t host_bytes = 0, buffers_asked = 0, spare_buffers = 0;
    bool verify = true;
    std::vector<swap::LeasedObject> objects{};
    // Once it is open; destroyed from below.
    int64_t buffers = 0;
    std::unique_ptr<HostMemory> memory{};
    std::unique_ptr<aio::Volume> volume{};
    std::unique_ptr<swap::LeasedStore> store{};
    std::vector<LeasePlace> leases{};
    std::vector<uint32_t> free{};

    int64_t leased() const { return std::ssize(leases) - std::ssize(free); }
};

// The slots and memory that the objects ask for.
struct Layout {
    int64_t host_bytes = 0;    // bytes of objects whose home is host memory
    int64_t buffer_bytes = 0;  // the largest of those on NVMe
    int64_t on_nvme = 0;
    std::map<int64_t, int64_t> slots{};  // by their bytes
};

Layout lay_out(std::vector<swap::LeasedObject>& objects) {
    Layout layout;
    for (swap::LeasedObject& object : objects) {
        if (object.home == swap::Home::host) {
            object.offset = layout.host_bytes;
            layout.host_bytes += round_up(object.bytes, kHostAlignment);
            continue;
        }
        ++layout.on_nvme;
        const int64_t bytes = round_up(object.bytes, kPage);
        layout.buffer_bytes = std::max(layout.buffer_bytes, bytes);
        ++layout.slots[bytes];
    }
    for (swap::LeasedObject& object : objects) {
        if (object.home == swap::Home::nvme)
            object.slot_class = static_cast<int>(std::distance(
                layout.slots.begin(), layout.slots.find(round_up(object.bytes, kPage))));
    }
    return layout;
}

int64_t buffers_for(const Store& store, const Layout& layout) {
    if (layout.on_nvme == 0) return 0;
    const int64_t room =
        std::max<int64_t>(0, store.host_bytes - layout.host_bytes) / layout.buffer_bytes;
    const int64_t wanted = store.buffers_asked > 0 ? store.buffers_asked : 1;
    if (room < wanted)
        throw Error(
            Trouble::does_not_fit,
            {.what = "host_bytes has no room for the buffers of objects on NVMe",
             .measured = std::to_string(wanted) + " buffer(s) of " +
                         std::to_string(layout.buffer_bytes) + " bytes, and " +
                         std::to_string(layout.host_bytes) + " bytes of objects in host memory",
             .limit = std::to_string(store.host_bytes) + " bytes (host_bytes)",
             .remedy = "give at least " +
                       std::to_string(wanted * layout.buffer_bytes + layout.host_bytes) +
                       ", or register smaller objects"});
    return store.buffers_asked > 0 ? store.buffers_asked : std::min(room, layout.on_nvme);
}

void check_host(const Store& store, const Layout& layout) {
    if (layout.host_bytes <= store.host_bytes) return;
    throw Error(Trouble::does_not_fit,
                {.what = "objects at home in host memory do not fit into host_bytes",
                 .measured = std::to_string(layout.host_bytes) + " bytes",
                 .limit = std::to_string(store.host_bytes) + " bytes (host_bytes)",
                 .remedy = "give as many, or register objects on NVMe"});
}

// With a slot more for each buffer no write waits for another.
std::unique_ptr<aio::Volume> open_volume(const Store& store, const Layout& layout, int64_t buffers,
                                         Executor& executor) {
    aio::VolumeOptions options = store.volume_options;
    options.paths = store.paths;
    for (const auto& [bytes, count] : layout.slots)
        options.classes.push_back({.name = "objects of " + std::to_string(bytes) + " bytes",
                                   .slot_bytes = bytes,
                                   .slots = count + std::min(count, buffers)});
    return aio::Volume::open(std::move(options), executor);
}

void open(Store& store) {
    if (store.store) refuse_argument("the store is open", "a second call", "one");
    if (store.objects.empty())
        refuse_argument("no object is registered", "0", "1 or more before ferry_store_open");
    const Layout layout = lay_out(store.objects);
    check_host(store, layout);
    const int64_t buffers = buffers_for(store, layout);
    auto memory = std::make_unique<HostMemory>(store.host_bytes, store.host);
    std::unique_ptr<aio::Volume> volume;
    if (layout.on_nvme > 0) volume = open_volume(store, layout, buffers, memory->executor());
    const int64_t buffer_bytes =
        volume ? round_up(layout.buffer_bytes, volume->alignment()) : int64_t{0};
    swap::LeasedStoreOptions options{
        .objects = store.objects,
        .host_arena = memory->reserve("objects", layout.host_bytes),
        .buffers = memory->reserve("buffers", buffers * buffer_bytes),
        .buffer_bytes = buffer_bytes,
        .spare_buffers = store.spare_buffers,
        .verify = store.verify,
        .parallel = [teams = &memory->teams()](int64_t count,
                                               const std::function<void(int64_t)>& body) {
            teams->all().parallel(count, body);
        }};
    store.store = swap::LeasedStore::make(std::move(options), memory->executor(), volume.get());
    store.memory = std::move(memory);
    store.volume = std::move(volume);
    store.buffers = buffers;
}

std::unique_ptr<Store> make(const ferry_store_options& given) {
    check_range("host_bytes", given.host_bytes, 1, int64_t{1} << 50);
    check_range("buffers", given.buffers, 0, int64_t{1} << 31);
    check_range("spare_buffers", given.spare_buffers, 0, int64_t{1} << 31);
    check_choice("no_verify", given.no_verify, 1);
    auto made = std::make_unique<Store>();
    made->paths = paths_of(given.paths, given.path_count);
    made->host = host_memory_options(given.threads, given.lock_for, given.gpu, given.allocator);
    made->volume_options.backend = backend_of(given.backend);
    if (given.queue_depth) made->volume_options.queue_depth = given.queue_depth;
    made->host_bytes = given.host_bytes;
    made->buffers_asked = given.buffers;
    made->spare_buffers = given.spare_buffers;
    made->verify = given.no_verify == 0;
    return made;
}

swap::LeasedStore& opened(Store& store) {
    if (!store.store) refuse_argument("the store is not open", "registering", "ferry_store_open");
    return *store.store;
}

uint64_t keep_lease(Store& store, swap::Lease lease) noexcept {
    const uint32_t index = store.free.back();
    store.free.pop_back();
    LeasePlace& place = store.leases[index];
    place.lease = std::move(lease);
    return uint64_t{++place.generation} << 32 | index;
}

// So that keeping a lease, and giving its place back, cannot fail.
void make_room_for_lease(Store& store) {
    if (!store.free.empty()) return;
    store.free.reserve(store.leases.size() + 1);
    store.leases.emplace_back();
    store.free.push_back(static_cast<uint32_t>(store.leases.size() - 1));
}

void release(Store& store, uint64_t lease) {
    const auto index = static_cast<uint32_t>(lease);
    if (index >= store.leases.size() || store.leases[index].generation != lease >> 32 ||
        !store.leases[index].lease)
        refuse_argument("no such lease: it was released, or never was one", std::to_string(lease),
                        std::to_string(store.leased()) + " leases are held");
    store.leases[index].lease.give_back();
    store.free.push_back(index);
}

}  // namespace
}  // namespace ferry::capi

using namespace ferry::capi;

ferry_status ferry_store_create(const ferry_store_options* options, ferry_store** store) {
    return guarded(__func__, [&] {
        const ferry_store_options given = taken("options", options);
        check_given("store", store);
        hand_out(store, make(given));
    });
}

ferry_status ferry_store_register(ferry_store* store, int64_t bytes, int32_t home,
                                  uint32_t* object) {
    return with<Store>(__func__, store, [&](Store& mine) {
        check_given("object", object);
        check_range("bytes", bytes, 1, kObjectBytesMax);
        check_choice("home", home, FERRY_NVME);
        if (mine.store) refuse_argument("the store is open", "open", "register before");
        if (home == FERRY_NVME && mine.paths.empty())
            refuse_argument("an object on NVMe, and the store has no path", "0 paths", "1 or more");
        check_range("objects", std::ssize(mine.objects) + 1, 1, kObjectsMax);
        mine.objects.push_back(
            {.home = home == FERRY_NVME ? ferry::swap::Home::nvme : ferry::swap::Home::host,
             .bytes = bytes});
        *object = static_cast<uint32_t>(mine.objects.size() - 1);
    });
}

ferry_status ferry_store_open(ferry_store* store) {
    return with<Store>(__func__, store, [](Store& mine) { open(mine); });
}

ferry_status ferry_store_destroy(ferry_store* store) {
    return close_handle<Store>(__func__, store, [](Store& mine) {
        if (mine.leased() > 0)
            refuse_argument("leases of the store are held", std::to_string(mine.leased()),
                            "0: release them first");
    });
}

ferry_status ferry_store_abandon(ferry_store* store) {
    return close_handle<Store>(__func__, store, [](Store& mine) {
        if (mine.memory) abandon(std::shared_ptr<HostMemory>(std::move(mine.memory)));
    });
}

ferry_status ferry_store_acquire(ferry_store* store, uint32_t object, int32_t access,
                                 uint64_t* lease, void** bytes) {
    return with<Store>(__func__, store, [&](Store& mine) {
        check_given("lease", lease);
        check_given("bytes", bytes);
        check_choice("access", access, FERRY_OVERWRITE);
        ferry::swap::LeasedStore& leased = opened(mine);
        make_room_for_lease(mine);
        ferry::swap::Lease got = leased.acquire(object, static_cast<ferry::swap::Access>(access));
        *bytes = got.bytes().data();
        *lease = keep_lease(mine, std::move(got));
    });
}

ferry_status ferry_store_release(ferry_store* store, uint64_t lease) {
    return with<Store>(__func__, store, [&](Store& mine) { release(mine, lease); });
}

ferry_status ferry_store_prefetch(ferry_store* store, const uint32_t* objects, size_t count) {
    return with<Store>(__func__, store, [&](Store& mine) {
        if (count > 0) check_given("objects", objects);
        opened(mine).prefetch(std::span(objects, count));
    });
}

ferry_status ferry_store_flush(ferry_store* store) {
    return with<Store>(__func__, store, [](Store& mine) { opened(mine).flush(); });
}

ferry_status ferry_store_check(ferry_store* store) {
    return with<Store>(__func__, store, [](Store& mine) { opened(mine).check(); });
}

ferry_status ferry_store_revert(ferry_store* store, uint32_t object) {
    return with<Store>(__func__, store, [&](Store& mine) {
        if (!opened(mine).revert(object))
            refuse_argument("the object has no contents before", std::to_string(object),
                            "one that was written without failure");
    });
}

ferry_status ferry_store_get_stats(ferry_store* store, ferry_store_stats* stats) {
    return with<Store>(__func__, store, [&](Store& mine) {
        check_size("stats", stats);
        const ferry::swap::LeaseReport report = opened(mine).report();
        give<ferry_store_stats>(stats,
                                {.size = 0,
                                 .acquired = report.acquired,
                                 .hits = report.hits,
                                 .reads = report.reads,
                                 .writes = report.writes,
                                 .leased = mine.leased(),
                                 .buffers = mine.buffers,
                                 .host_bytes = mine.memory->reserved_bytes(),
                                 .nvme_bytes = mine.volume ? mine.volume->reserved_bytes() : 0});
    });
}
