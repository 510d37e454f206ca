#include <sys/mman.h>

#include <cerrno>
#include <cstring>
#include <optional>

#include "ferry/pinned_mem.h"
#include "huge_pages.h"
#include "touch.h"

namespace ferry::pinned_mem {
namespace {

// Page-locked at a time, by one thread: large, for a copy that crosses pieces is cut in two.
constexpr int64_t kLockedPiece = 256 * kMiB;
constexpr int64_t kPage = 4 * kKiB;  // the smallest there is

int64_t pieces_of(std::span<std::byte> pages) {
    return ceil_div(static_cast<int64_t>(pages.size()), kLockedPiece);
}

void report(const SlabReport& slab) {
    const int64_t possible = slab.bytes / kHugePage * kHugePage;
    if (slab.huge_bytes >= possible) return;
    log_warn("host memory \"" + slab.name + "\": " + format_bytes(slab.huge_bytes) + " of " +
             format_bytes(slab.bytes) + " lie on huge pages (" + why_not_huge() +
             "); storage and copies may be slower");
}

}  // namespace

Pool::Pool(const Topology& topology, int64_t budget_bytes)
    : topology_(topology), budget_bytes_(budget_bytes) {}

Pool::~Pool() {
    for (const auto pages : locked_) device_->unlock_pages(pages);
    for (const Mapping& mapping : mappings_) ::munmap(mapping.base, mapping.bytes);
}

std::span<std::byte> Pool::reserve(std::string name, int64_t bytes, NodeTeams& teams) {
    FERRY_CHECK(!sealed_, "the pool is sealed: everything is reserved at start-up");
    if (bytes == 0) return {};
    const auto refuse = [&](const std::string& limit) {
        throw Error(
            Trouble::does_not_fit,
            {.what = "host memory for \"" + name + "\" cannot be reserved",
             .measured = format_bytes(bytes) + " on top of " + format_bytes(reserved_bytes_),
             .limit = limit,
             .remedy = "raise budgets.host or move more state to budgets.nvme"});
    };
    if (bytes > budget_bytes_ - reserved_bytes_) refuse("budget " + format_bytes(budget_bytes_));
    if (reserved_bytes_ + bytes > topology_.memory_left_bytes) {
        refuse(format_bytes(topology_.memory_left_bytes) + " left of the " +
               format_bytes(topology_.memory_limit_bytes) + " of this machine or cgroup");
    }
    // Over-reserve address space (not memory) so that the slab starts on a huge page.
    const size_t mapped = static_cast<size_t>(round_up(bytes, 4096) + kHugePage);
    void* base = ::mmap(nullptr, mapped, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (base == MAP_FAILED) refuse(std::string("mmap: ") + std::strerror(errno));
    mappings_.push_back({base, mapped});
    const auto address = reinterpret_cast<uintptr_t>(base);
    auto* aligned =
        static_cast<std::byte*>(base) +
        (static_cast<uintptr_t>(round_up(static_cast<int64_t>(address), kHugePage)) - address);
    // A wish; what came of it is looked at below.
    ::madvise(aligned, static_cast<size_t>(bytes), MADV_HUGEPAGE);
    // The kernel hands out zeros.
    for_each_page(bytes, kHugePage, teams, [&](int64_t first, int64_t size) {
        for (int64_t at = 0; at < size; at += kPage) aligned[first + at] = std::byte{0};
    });
    reserved_bytes_ += bytes;
    const std::span<std::byte> slab(aligned, static_cast<size_t>(bytes));
    reports_.push_back({std::move(name), bytes, huge_bytes_of(slab)});
    report(reports_.back());
    return slab;
}

void Pool::lock_piece(Device& device, std::span<std::byte> pages, int64_t index) {
    const auto bytes = static_cast<int64_t>(pages.size());
    const int64_t first = index * kLockedPiece;
    const auto piece = pages.subspan(static_cast<size_t>(first),
                                     static_cast<size_t>(std::min(kLockedPiece, bytes - first)));
    device.lock_pages(piece);
    const std::lock_guard lock(mutex_);
    FERRY_CHECK(device_ == nullptr || device_ == &device, "a pool is locked for one device");
    device_ = &device;
    locked_.push_back(piece);
}

void Pool::lock_for(Device& device, std::span<std::byte> pages, Team& team) {
    std::optional<Error> failure;
    team.parallel(pieces_of(pages), [&](int64_t index) {
        try {
            lock_piece(device, pages, index);
        } catch (const Error& error) {
            const std::lock_guard lock(mutex_);
            if (!failure) failure = error;
        }
    });
    if (failure) throw Error(*failure);
}

std::future<void> Pool::lock_behind(Device& device, std::span<std::byte> pages) {
    return std::async(std::launch::async, [this, &device, pages] {
        for (int64_t index = 0; index < pieces_of(pages); ++index) lock_piece(device, pages, index);
    });
}

}  // namespace ferry::pinned_mem
