#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/prctl.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <fstream>
#include <mutex>

#include "ferry/pinned_mem.h"
#include "huge_pages.h"
#include "tests/support/child.h"
#include "topology/topology.h"
#include "touch.h"

namespace ferry::pinned_mem {
namespace {

class PoolTest : public testing::Test {
protected:
    Topology topology_ = [] {
        Topology made;
        made.memory_limit_bytes = 128 * kMiB;
        made.memory_left_bytes = 64 * kMiB;
        made.nodes = {{.os_index = 0, .cores = {0}}, {.os_index = 1, .cores = {1}}};
        return made;
    }();
    NodeTeams teams_{topology_, 2};
};

TEST_F(PoolTest, SlabsAreAlignedZeroAndCounted) {
    Pool pool(topology_, 16 * kMiB);
    const auto a = pool.reserve("a", 5 * kMiB + 123, teams_);
    const auto b = pool.reserve("b", 4096, teams_);
    EXPECT_EQ(reinterpret_cast<uintptr_t>(a.data()) % (2 * kMiB), 0u);
    EXPECT_EQ(a.size(), static_cast<size_t>(5 * kMiB + 123));
    EXPECT_TRUE(std::all_of(a.begin(), a.end(), [](std::byte x) { return x == std::byte{0}; }));
    EXPECT_EQ(pool.reserved_bytes(), 5 * kMiB + 123 + 4096);
    ASSERT_EQ(pool.slabs().size(), 2u);
    EXPECT_EQ(pool.slabs()[1].name, "b");
    EXPECT_NE(a.data(), b.data());
    EXPECT_TRUE(pool.reserve("nothing", 0, teams_).empty());
}

TEST_F(PoolTest, AProgramMayGiveTheMemory) {
    std::vector<std::pair<void*, int64_t>> given, back;
    int64_t past = 0;
    const Allocator allocator{
        .allocate = [&](int64_t bytes, int64_t alignment) -> void* {
            EXPECT_EQ(alignment, 2 * kMiB);
            if (bytes == 3) return nullptr;
            auto* const memory = static_cast<std::byte*>(
                std::aligned_alloc(static_cast<size_t>(alignment),
                                   static_cast<size_t>(round_up(bytes + past, alignment))));
            std::fill_n(memory, bytes + past, std::byte{0x5a});
            given.emplace_back(memory + past, bytes);
            return memory + past;
        },
        .release =
            [&](void* memory, int64_t bytes) {
                back.emplace_back(memory, bytes);
                std::free(reinterpret_cast<void*>(reinterpret_cast<uintptr_t>(memory) / (2 * kMiB) *
                                                  (2 * kMiB)));
            }};
    {
        Topology little = topology_;
        little.memory_left_bytes = kMiB;  // the program's memory may have been taken before
        Pool pool(little, 16 * kMiB, allocator);
        const auto a = pool.reserve("a", 5 * kMiB + 123, teams_);
        EXPECT_EQ(a.data(), given[0].first);
        EXPECT_TRUE(std::ranges::all_of(a, [](std::byte x) { return x == std::byte{0}; }));
        // All of it is cleared at once: nobody knows what is behind `now`.
        const auto b = pool.reserve("b", 3 * kMiB, kMiB, teams_);
        EXPECT_TRUE(std::ranges::all_of(b, [](std::byte x) { return x == std::byte{0}; }));
        pool.touch(b, teams_);
        EXPECT_THROW(pool.reserve("none", 3, teams_), Error);
        EXPECT_THROW(pool.reserve("too much", 9 * kMiB, teams_), Error) << "the budget";
        past = 64;
        EXPECT_THROW(pool.reserve("not aligned", 4096, teams_), Error);
        EXPECT_EQ(pool.reserved_bytes(), 8 * kMiB + 123);
        EXPECT_TRUE(back.empty());
    }
    EXPECT_EQ(given.size(), 3u);
    EXPECT_EQ(back, given);
}

TEST_F(PoolTest, TheBudgetAndTheMachineAreLimits) {
    Pool pool(topology_, 8 * kMiB);
    pool.reserve("a", 8 * kMiB, teams_);
    const auto problem_of = [&](Pool& full, int64_t bytes) {
        try {
            full.reserve("more", bytes, teams_);
        } catch (const Error& error) {
            EXPECT_EQ(error.trouble(), Trouble::does_not_fit);
            return error.problem();
        }
        ADD_FAILURE() << "it was reserved";
        return Problem{};
    };
    const Problem of_budget = problem_of(pool, 1);
    EXPECT_EQ(of_budget.where, "budgets.host");
    EXPECT_EQ(of_budget.limit, "8.00 MiB");
    EXPECT_THAT(of_budget.remedy, testing::HasSubstr("raise budgets.host"));
    // More of a budget would not help here.
    Pool large(topology_, kGiB);
    const Problem of_machine = problem_of(large, 65 * kMiB);
    EXPECT_EQ(of_machine.where, "memory of this machine or cgroup");
    EXPECT_EQ(of_machine.limit, "64.00 MiB left of 128.00 MiB");
    EXPECT_THAT(of_machine.remedy, testing::Not(testing::HasSubstr("raise budgets.host")));
}

TEST_F(PoolTest, NothingIsReservedOnceSealed) {
    Pool pool(topology_, 8 * kMiB);
    pool.seal();
    EXPECT_DEATH(pool.reserve("late", 1, teams_), "sealed");
}

// Huge pages of the whole process, from another file than the one that the pool reads.
int64_t huge_bytes_of_process() {
    std::ifstream file("/proc/self/smaps_rollup");
    std::string name;
    while (file >> name && name != "AnonHugePages:") {
    }
    int64_t kib = 0;
    file >> kib;
    return kib * kKiB;
}

TEST_F(PoolTest, CountsTheHugePagesItGot) {
    if (!why_not_huge().starts_with("memory")) GTEST_SKIP() << why_not_huge();
    Pool pool(topology_, 16 * kMiB);
    const int64_t before = huge_bytes_of_process();
    testing::internal::CaptureStderr();
    pool.reserve("a", 8 * kMiB + 4096, teams_);
    const std::string said = testing::internal::GetCapturedStderr();
    const int64_t huge = pool.slabs()[0].huge_bytes;
    EXPECT_EQ(huge, huge_bytes_of_process() - before);
    EXPECT_LE(huge, 8 * kMiB);
    EXPECT_EQ(said.empty(), huge == 8 * kMiB) << said;
    pool.reserve("small", 4096, teams_);  // none is possible, and none is missed
    EXPECT_EQ(pool.slabs()[1].huge_bytes, 0);
}

TEST_F(PoolTest, SaysWhenItGotNoHugePages) {
    const int status = in_child([this] {
        if (prctl(PR_SET_THP_DISABLE, 1, 0, 0, 0) != 0) return 1;
        testing::internal::CaptureStderr();
        NodeTeams one({.nodes = {{.os_index = 0, .cores = {0}}}}, 1);
        Pool pool(topology_, 16 * kMiB);
        pool.reserve("a", 8 * kMiB, one);
        const std::string said = testing::internal::GetCapturedStderr();
        for (const char* text : {"\"a\"", "0 B of 8.00 MiB", "PR_SET_THP_DISABLE"}) {
            if (said.find(text) != std::string::npos) continue;
            fprintf(stderr, "no %s in: %s\n", text, said.c_str());
            return 2;
        }
        return pool.slabs()[0].huge_bytes == 0 ? 0 : 3;
    });
    EXPECT_EQ(status, 0);
}

// Each page once, on the node whose turn it is.
TEST_F(PoolTest, TouchesPagesOnTheNodesInTurn) {
    if (discover_topology().cores() < 2) GTEST_SKIP() << "one core";
    constexpr int64_t kPage = 4096, kBytes = 7 * kPage + 5;
    struct Touched {
        int64_t first, size;
        int core;
    };
    std::mutex mutex;
    std::vector<Touched> touched;
    for_each_page(kBytes, kPage, teams_, [&](int64_t first, int64_t size) {
        const std::lock_guard lock(mutex);
        touched.push_back({first, size, sched_getcpu()});
    });
    std::ranges::sort(touched, {}, &Touched::first);
    ASSERT_EQ(touched.size(), 8u);
    for (int page = 0; page < 8; ++page) {
        const Touched& one = touched[static_cast<size_t>(page)];
        EXPECT_EQ(one.first, page * kPage);
        EXPECT_EQ(one.size, page < 7 ? kPage : 5);
        EXPECT_EQ(one.core, topology_.nodes[static_cast<size_t>(page % 2)].cores[0]);
    }
}

// Whether the kernel has given it all its pages.
bool is_touched(std::span<const std::byte> memory) {
    std::vector<unsigned char> pages(static_cast<size_t>(ceil_div(std::ssize(memory), 4096)));
    void* base = const_cast<std::byte*>(memory.data());
    EXPECT_EQ(::mincore(base, memory.size(), pages.data()), 0);
    return std::ranges::all_of(pages, [](unsigned char page) { return (page & 1) != 0; });
}

// Keeps count of what is locked, and refuses from the n-th call on.
class CountingDevice final : public Device {
public:
    explicit CountingDevice(size_t refuses_at = SIZE_MAX) : refuses_at_(refuses_at) {}

    void lock_pages(std::span<std::byte> host) override {
        const std::lock_guard lock(mutex_);
        if (calls_++ >= refuses_at_)
            throw Error(Trouble::does_not_fit, {.what = "no more pages can be locked"});
        EXPECT_TRUE(is_touched(host)) << "locked before it was touched";
        locked_.push_back(host);
    }
    void unlock_pages(std::span<std::byte> host) noexcept override {
        const auto found = std::ranges::find_if(locked_, [&](const auto& pages) {
            return pages.data() == host.data() && pages.size() == host.size();
        });
        if (found == locked_.end()) {
            ADD_FAILURE() << "unlocked what was not locked";
            return;
        }
        // Still mapped: a GPU must not be left with pages that are somebody else's.
        host.front() = std::byte{1};
        locked_.erase(found);
    }
    // In order of address.
    std::vector<std::span<std::byte>> locked() {
        std::ranges::sort(locked_, {}, [](const auto& pages) { return pages.data(); });
        return locked_;
    }
    size_t calls() const { return calls_; }

    DeviceKind kind() const noexcept override { return DeviceKind::cuda; }
    std::string architecture() const override { return "counting"; }
    int64_t overhead_bytes() const override { return 0; }
    int64_t free_bytes() const override { return 0; }
    void reserve(int64_t) override {}
    std::span<std::byte> memory() noexcept override { return {}; }
    void check() override {}

private:
    const size_t refuses_at_;
    std::mutex mutex_;
    size_t calls_ = 0;
    std::vector<std::span<std::byte>> locked_;
};

class LockTest : public PoolTest {
protected:
    void SetUp() override { topology_.memory_left_bytes = kGiB; }
};

TEST_F(LockTest, LocksEverySlabWholeAndUnlocksBeforeItIsUnmapped) {
    CountingDevice device;
    {
        Pool pool(topology_, kGiB);
        std::vector slabs{pool.reserve("a", 3 * kMiB, teams_), pool.reserve("b", 8192, teams_)};
        EXPECT_EQ(device.calls(), 0u);
        for (const auto slab : slabs) pool.lock_for(device, slab, teams_.all());
        std::ranges::sort(slabs, {}, [](const auto& slab) { return slab.data(); });
        const auto locked = device.locked();
        ASSERT_EQ(locked.size(), 2u);
        for (size_t i = 0; i < 2; ++i) {
            EXPECT_EQ(locked[i].data(), slabs[i].data());
            EXPECT_EQ(locked[i].size(), slabs[i].size());
        }
    }
    EXPECT_TRUE(device.locked().empty());
}

TEST_F(LockTest, CutsALargeSlabIntoPartsWithoutAGap) {
    CountingDevice device;
    {
        Pool pool(topology_, kGiB);
        const auto slab = pool.reserve("a", 256 * kMiB + 4096, teams_);
        pool.lock_for(device, slab, teams_.all());
        const auto locked = device.locked();
        ASSERT_EQ(locked.size(), 2u);
        EXPECT_EQ(locked[0].data(), slab.data());
        EXPECT_EQ(locked[0].size(), static_cast<size_t>(256 * kMiB));
        EXPECT_EQ(locked[1].data(), slab.data() + 256 * kMiB);
        EXPECT_EQ(locked[1].size(), 4096u);
    }
    EXPECT_TRUE(device.locked().empty());
}

TEST_F(LockTest, ARefusalHalfWayUnlocksWhatWasLocked) {
    for (const bool behind : {false, true}) {
        CountingDevice device(2);
        {
            Pool pool(topology_, kGiB);
            const auto slab = pool.reserve("a", 4 * 256 * kMiB, teams_);
            try {
                if (behind)
                    pool.lock_behind(device, slab).get();
                else
                    pool.lock_for(device, slab, teams_.all());
                FAIL() << "the refusal was not passed on";
            } catch (const Error& error) {
                EXPECT_EQ(error.trouble(), Trouble::does_not_fit);
                EXPECT_THAT(error.what(), testing::HasSubstr("no more pages can be locked"));
            }
            EXPECT_EQ(device.locked().size(), 2u);
        }
        EXPECT_TRUE(device.locked().empty());
    }
}

TEST_F(LockTest, LocksTheRestWhileOthersUseTheMemory) {
    CountingDevice device;
    {
        Pool pool(topology_, kGiB);
        const int64_t now = 3 * Pool::kPartBytes;
        const auto slab = pool.reserve("a", 512 * kMiB + 8192, now, teams_);
        const auto first = slab.first(static_cast<size_t>(now));
        EXPECT_TRUE(is_touched(first));
        EXPECT_FALSE(is_touched(slab.last(4096)));
        pool.lock_for(device, first, teams_.all());
        pool.seal();
        const std::array used{first.size() - 1, first.size(), slab.size() - 1};
        for (const size_t at : used) slab[at] = std::byte{1};
        pool.lock_behind(device, slab.subspan(first.size())).get();
        for (const size_t at : used) EXPECT_EQ(slab[at], std::byte{1});
        EXPECT_EQ(std::ranges::count(slab, std::byte{0}), std::ssize(slab) - 3);
        const std::byte* end = slab.data();
        for (const auto& part : device.locked()) {
            EXPECT_EQ(part.data(), end);
            end = part.data() + part.size();
        }
        EXPECT_EQ(end, slab.data() + slab.size());
    }
    EXPECT_TRUE(device.locked().empty());
}

// With what lies around it, and no further.
TEST_F(LockTest, APartIsTouchedBeforeItIsWrittenTo) {
    Topology roomy = topology_;
    roomy.memory_left_bytes = kGiB;
    roomy.nodes.resize(1);
    NodeTeams team(roomy, 2);
    Pool pool(roomy, kGiB);
    const auto slab = pool.reserve("a", 130 * kMiB + 4096, 4096, team);
    const auto part = slab.subspan(5 * kMiB, 3 * kMiB);
    part[7] = std::byte{7};
    pool.touch(part, team);
    EXPECT_TRUE(is_touched(slab.first(64 * kMiB)));
    EXPECT_EQ(part[7], std::byte{7});
    EXPECT_FALSE(is_touched(slab.subspan(64 * kMiB, 4096)));
    pool.touch(slab.subspan(60 * kMiB, 5 * kMiB), team);
    EXPECT_TRUE(is_touched(slab.first(128 * kMiB)));
    EXPECT_FALSE(is_touched(slab.subspan(128 * kMiB, 4096)));
    pool.touch(slab.last(1), team);
    EXPECT_TRUE(is_touched(slab.last(4096)));
}

TEST_F(LockTest, NothingIsLeftToLockBehind) {
    CountingDevice device;
    Pool pool(topology_, kGiB);
    const auto slab = pool.reserve("a", kMiB, kMiB, teams_);
    pool.lock_behind(device, slab.subspan(slab.size())).get();
    EXPECT_EQ(device.calls(), 0u);
}

TEST_F(LockTest, IsForOneDevice) {
    CountingDevice device, another;
    Pool pool(topology_, kGiB);
    const auto slab = pool.reserve("a", 2 * Pool::kPartBytes, teams_);
    const auto part = static_cast<size_t>(Pool::kPartBytes);
    pool.lock_for(device, slab.first(part), teams_.all());
    EXPECT_DEATH(pool.lock_for(another, slab.subspan(part), teams_.all()), "for one device");
    EXPECT_DEATH(pool.lock_for(device, slab, teams_.all()), "locked already");
}

}  // namespace
}  // namespace ferry::pinned_mem
