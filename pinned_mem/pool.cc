#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <optional>
#include <thread>

#include "base/log.h"
#include "base/process_limits.h"
#include "base/threads.h"
#include "ferry/pinned_mem.h"
#include "huge_pages.h"
#include "topology/topology.h"
#include "touch.h"

namespace ferry::pinned_mem {
namespace {

// Page-locked at a time, by one thread: large, for a copy that crosses parts is cut in two.
constexpr int64_t kLockedPart = 256 * kMiB;
constexpr int64_t kPage = 4 * kKiB;  // the smallest there is
// Touched at a time where something is about to be filled, a node: chunks have fewer than a server
// has cores.
constexpr int64_t kPagesAtOnce = 32;
// That touch what is locked behind the work of others: as fast as one thread locks it.
constexpr int kTouchers = 4;

int64_t parts_of(std::span<std::byte> pages) {
    return ceil_div(static_cast<int64_t>(pages.size()), kLockedPart);
}
std::span<std::byte> part_of(std::span<std::byte> pages, int64_t index) {
    const int64_t first = index * kLockedPart, left = static_cast<int64_t>(pages.size()) - first;
    return pages.subspan(static_cast<size_t>(first),
                         static_cast<size_t>(std::min(kLockedPart, left)));
}

void report(const SlabReport& slab) {
    const int64_t possible = slab.bytes / kHugePage * kHugePage;
    if (slab.huge_bytes >= possible) return;
    log_warn("host memory \"" + slab.name + "\": " + format_bytes(slab.huge_bytes) + " of " +
             format_bytes(slab.bytes) + " lie on huge pages (" + why_not_huge() +
             "); storage and copies may be slower");
}

// Gives memory its pages and leaves what it holds as it is, whoever writes to it meanwhile.
bool populate(std::byte* at, int64_t bytes) {
    return ::madvise(at, static_cast<size_t>(bytes), MADV_POPULATE_WRITE) == 0;
}

// The nodes in turn, as for_each_page(), by threads that end with it.
void populate_beside(const Topology& machine, std::span<std::byte> pages) {
    const auto bytes = static_cast<int64_t>(pages.size()), nodes = std::ssize(machine.nodes);
    const int64_t threads = round_up(std::clamp<int64_t>(machine.cores() / 4, 1, kTouchers), nodes);
    std::vector<std::jthread> touchers;
    for (int64_t mine = 0; mine < threads; ++mine) {
        touchers.emplace_back([&machine, pages, bytes, nodes, threads, mine] {
            if (nodes > 1) run_on(machine.nodes[static_cast<size_t>(mine % nodes)].cores);
            for (int64_t at = mine * kHugePage; at < bytes; at += threads * kHugePage)
                populate(pages.data() + at, std::min(kHugePage, bytes - at));
        });
    }
}

}  // namespace

Pool::Pool(const Topology& topology, int64_t budget_bytes, Allocator allocator)
    : topology_(topology), budget_bytes_(budget_bytes), allocator_(std::move(allocator)) {}

Pool::~Pool() {
    for (const auto pages : locked_) device_->unlock_pages(pages);
    for (const Mapping& mapping : mappings_) {
        if (!allocator_.given())
            ::munmap(mapping.base, mapping.bytes);
        else if (allocator_.release)
            allocator_.release(mapping.base, static_cast<int64_t>(mapping.bytes));
    }
}

void Pool::refuse(const std::string& name, int64_t bytes, const char* where,
                  const std::string& limit, const char* remedy) const {
    throw Error(Trouble::does_not_fit,
                {.what = "host memory for \"" + name + "\" cannot be reserved",
                 .where = where,
                 .measured = format_bytes(bytes) + " on top of " + format_bytes(reserved_bytes_),
                 .limit = limit,
                 .remedy = remedy});
}

// From the system, on huge pages where it has them. The kernel hands out zeros.
std::byte* Pool::map(const std::string& name, int64_t bytes) {
    const std::string space = address_space_limit();
    // Over-reserve address space (not memory) so that the slab starts on a huge page.
    const size_t mapped = static_cast<size_t>(round_up(bytes, 4096) + kHugePage);
    void* base = ::mmap(nullptr, mapped, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (base == MAP_FAILED)
        refuse(name, bytes, "address space of this process",
               space.empty() ? std::string("mmap: ") + std::strerror(errno) : space,
               "raise the limit of the process (ulimit -v), or move more state to budgets.nvme");
    mappings_.push_back({base, mapped});
    const auto address = reinterpret_cast<uintptr_t>(base);
    auto* aligned =
        static_cast<std::byte*>(base) +
        (static_cast<uintptr_t>(round_up(static_cast<int64_t>(address), kHugePage)) - address);
    // A wish; what came of it is looked at later.
    ::madvise(aligned, static_cast<size_t>(bytes), MADV_HUGEPAGE);
    return aligned;
}

std::byte* Pool::ask_for(const std::string& name, int64_t bytes) {
    void* const memory = allocator_.allocate(bytes, kHugePage);
    if (!memory)
        refuse(name, bytes, "the program's allocator", "it gave no memory",
               "let it give more, or move more state to budgets.nvme");
    mappings_.push_back({memory, static_cast<size_t>(bytes)});
    const auto past = static_cast<int64_t>(reinterpret_cast<uintptr_t>(memory)) % kHugePage;
    if (past != 0)
        throw Error(Trouble::usage,
                    {.what = "the program's allocator gave memory that is not aligned",
                     .where = "host memory for \"" + name + "\"",
                     .measured = format_bytes(past) + " past a boundary",
                     .limit = "multiples of " + format_bytes(kHugePage),
                     .remedy = "let it keep to the alignment that it is asked for"});
    return static_cast<std::byte*>(memory);
}

std::span<std::byte> Pool::reserve(std::string name, int64_t bytes, int64_t now, NodeTeams& teams) {
    FERRY_CHECK(!sealed_, "the pool is sealed: everything is reserved at start-up");
    if (bytes == 0) return {};
    if (bytes > budget_bytes_ - reserved_bytes_)
        refuse(name, bytes, "budgets.host", format_bytes(budget_bytes_),
               "raise budgets.host or move more state to budgets.nvme");
    const bool of_system = !allocator_.given();
    // What a program's allocator gives may have been the program's before.
    if (of_system && reserved_bytes_ + bytes > topology_.memory_left_bytes)
        refuse(name, bytes, "memory of this machine or cgroup",
               format_bytes(topology_.memory_left_bytes) + " left of " +
                   format_bytes(topology_.memory_limit_bytes),
               "end what else uses it, raise the cgroup's limit, or move more state to "
               "budgets.nvme and lower budgets.host");
    std::byte* const slab_begin = of_system ? map(name, bytes) : ask_for(name, bytes);
    if (now < bytes && (!of_system || !populate(slab_begin, kPage))) now = bytes;
    for_each_page(now, kHugePage, teams, [&](int64_t first, int64_t size) {
        if (!of_system)
            return static_cast<void>(std::memset(slab_begin + first, 0, static_cast<size_t>(size)));
        for (int64_t at = 0; at < size; at += kPage) slab_begin[first + at] = std::byte{0};
    });
    reserved_bytes_ += bytes;
    const std::span<std::byte> slab(slab_begin, static_cast<size_t>(bytes));
    slabs_.push_back({slab});
    reports_.push_back({std::move(name), bytes});
    if (now == bytes && of_system) look_for_huge_pages(slab);
    return slab;
}

size_t Pool::slab_of(std::span<std::byte> part) const {
    const auto slab = std::ranges::find_if(slabs_, [part](const Slab& one) {
        const std::byte* begin = one.memory.data();
        return part.data() >= begin && part.data() < begin + one.memory.size();
    });
    FERRY_CHECK(slab != slabs_.end(), "memory of another");
    return static_cast<size_t>(slab - slabs_.begin());
}

// Looks at the slab of these bytes, which are all touched.
void Pool::look_for_huge_pages(std::span<std::byte> part) {
    const size_t slab = slab_of(part);
    reports_[slab].huge_bytes = huge_bytes_of(slabs_[slab].memory);
    report(reports_[slab]);
}

void Pool::touch(std::span<std::byte> part, NodeTeams& teams) {
    if (part.empty()) return;
    auto& [slab, touched] = slabs_[slab_of(part)];
    // From a page whose turn is the first node's to one whose turn is the last's.
    const int64_t run = kPagesAtOnce * kHugePage * teams.count();
    touched.resize(static_cast<size_t>(ceil_div(std::ssize(slab), run)));
    const int64_t at = part.data() - slab.data();
    for (int64_t i = at / run; i * run < at + std::ssize(part); ++i) {
        if (touched[static_cast<size_t>(i)]) continue;
        touched[static_cast<size_t>(i)] = true;
        std::byte* first = slab.data() + i * run;
        for_each_page(std::min(run, std::ssize(slab) - i * run), kHugePage, teams,
                      [&](int64_t page, int64_t bytes) { populate(first + page, bytes); });
    }
}

void Pool::lock_part(Device& device, std::span<std::byte> part) {
    const auto meets = [part](std::span<std::byte> other) {
        return part.data() < other.data() + other.size() &&
               other.data() < part.data() + part.size();
    };
    {
        const std::lock_guard lock(mutex_);
        FERRY_CHECK(device_ == nullptr || device_ == &device, "a pool is locked for one device");
        FERRY_CHECK(std::ranges::none_of(locked_, meets), "these pages are locked already");
        device_ = &device;
    }
    device.lock_pages(part);
    const std::lock_guard lock(mutex_);
    locked_.push_back(part);
}

void Pool::lock_for(Device& device, std::span<std::byte> pages, Team& team) {
    std::optional<Error> failure;
    team.parallel(parts_of(pages), [&](int64_t index) {
        try {
            lock_part(device, part_of(pages, index));
        } catch (const Error& error) {
            const std::lock_guard lock(mutex_);
            if (!failure) failure = error;
        }
    });
    if (failure) throw Error(*failure);
}

std::future<void> Pool::lock_behind(Device& device, std::span<std::byte> pages) {
    return std::async(std::launch::async, [this, &device, pages] {
        for (int64_t index = 0; index < parts_of(pages); ++index) {
            const std::span<std::byte> part = part_of(pages, index);
            // The driver is free for others meanwhile.
            populate_beside(topology_, part);
            lock_part(device, part);
        }
        if (!pages.empty() && !allocator_.given()) look_for_huge_pages(pages);
    });
}

}  // namespace ferry::pinned_mem
