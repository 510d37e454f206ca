// Pinned memory.
#include "host_memory.h"

#include "ferry/pinned_mem.h"
#include "handles.h"
#include "options.h"

namespace ferry::capi {

HostMemory::HostMemory(int64_t budget_bytes, const HostMemoryOptions& options)
    : machine_(this_machine()),
      executor_(make_thread_executor()),
      device_(options.lock_for == DeviceKind::cpu
                  ? nullptr
                  : Device::open(options.lock_for, *executor_, options.gpu)),
      teams_(std::make_unique<NodeTeams>(*machine_, options.threads)),
      pool_(std::make_unique<pinned_mem::Pool>(*machine_, budget_bytes, options.allocator)) {}

HostMemory::~HostMemory() = default;

std::span<std::byte> HostMemory::reserve(const std::string& name, int64_t bytes) {
    const std::span<std::byte> memory = pool_->reserve(name, bytes, *teams_);
    if (device_ && !memory.empty()) pool_->lock_for(*device_, memory, teams_->all());
    return memory;
}

int64_t HostMemory::reserved_bytes() const { return pool_->reserved_bytes(); }

namespace {

struct Pool {
    static constexpr HandleKind kKind = HandleKind::pool;
    Pool(int64_t budget, const HostMemoryOptions& options)
        : budget_bytes(budget), memory(budget, options) {}
    const int64_t budget_bytes;
    HostMemory memory;
    bool sealed = false;

    void check_room(const char* name, int64_t bytes) const {
        if (sealed) refuse_argument("the pool is sealed", name, "reserve before ferry_pool_seal");
        const int64_t left = budget_bytes - memory.reserved_bytes();
        if (bytes <= left) return;
        throw Error(Trouble::does_not_fit, {.what = "the pool's budget is too small",
                                            .where = name,
                                            .measured = std::to_string(bytes) + " bytes",
                                            .limit = std::to_string(left) + " bytes are left of " +
                                                     std::to_string(budget_bytes),
                                            .remedy = "raise budget_bytes"});
    }
};

}  // namespace

HostMemoryOptions host_memory_options(int32_t threads, int32_t lock_for, int32_t gpu,
                                      const ferry_allocator* allocator) {
    check_range("gpu", gpu, 0, 1023);
    return {.threads = threads_of(threads),
            .lock_for = device_kind_of("lock_for", lock_for),
            .gpu = gpu,
            .allocator = allocator_of(allocator)};
}

}  // namespace ferry::capi

using namespace ferry::capi;

ferry_status ferry_pool_create(const ferry_pool_options* options, ferry_pool** pool) {
    return guarded(__func__, [&] {
        const ferry_pool_options given = taken("options", options);
        check_given("pool", pool);
        check_range("budget_bytes", given.budget_bytes, 1, int64_t{1} << 50);
        hand_out(pool, std::make_unique<Pool>(given.budget_bytes,
                                              host_memory_options(given.threads, given.lock_for,
                                                                  given.gpu, given.allocator)));
    });
}

ferry_status ferry_pool_destroy(ferry_pool* pool) { return close_handle<Pool>(__func__, pool); }

ferry_status ferry_pool_reserve(ferry_pool* pool, const char* name, int64_t bytes, void** memory) {
    return with<Pool>(__func__, pool, [&](Pool& mine) {
        check_given("name", name);
        check_given("memory", memory);
        check_range("bytes", bytes, 1, int64_t{1} << 50);
        mine.check_room(name, bytes);
        *memory = mine.memory.reserve(name, bytes).data();
    });
}

ferry_status ferry_pool_seal(ferry_pool* pool) {
    return with<Pool>(__func__, pool, [](Pool& mine) { mine.sealed = true; });
}

ferry_status ferry_pool_reserved_bytes(ferry_pool* pool, int64_t* bytes) {
    return with<Pool>(__func__, pool, [&](Pool& mine) {
        check_given("bytes", bytes);
        *bytes = mine.memory.reserved_bytes();
    });
}
