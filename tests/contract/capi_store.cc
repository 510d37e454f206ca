// The tiered store through the C ABI.
#include <algorithm>
#include <cstring>
#include <thread>
#include <utility>
#include <vector>

#include "tests/support/c_abi.h"
#include "tests/support/temporary_directory.h"

namespace ferry {
namespace {

constexpr int64_t kBytes = 20'000;  // no multiple of anything
constexpr int64_t kBuffer = 20'480;

class CapiStore : public testing::Test {
protected:
    CapiStore() : path_(path_at(directory_.path())) {
        options_.paths = &path_;
        options_.path_count = 1;
        options_.host_bytes = 2 * kBuffer;
        options_.threads = 1;
    }
    ~CapiStore() override {
        if (store_) {
            EXPECT_EQ(ferry_store_destroy(store_), FERRY_OK) << ferry_last_error();
        }
        EXPECT_TRUE(directory_.empty());
    }

    void create() { ASSERT_DONE(ferry_store_create(&options_, &store_)); }
    // So many objects on NVMe, and one in host memory last where there is room.
    void open(uint32_t objects) {
        create();
        for (uint32_t i = 0; i < objects; ++i) {
            uint32_t object = ~0u;
            ASSERT_DONE(ferry_store_register(store_, kBytes, FERRY_NVME, &object));
            ASSERT_EQ(object, i);
        }
        ASSERT_DONE(ferry_store_open(store_));
    }
    char* acquire(uint32_t object, int32_t access) {
        void* bytes = nullptr;
        EXPECT_EQ(ferry_store_acquire(store_, object, access, &lease_, &bytes), FERRY_OK)
            << ferry_last_error();
        return static_cast<char*>(bytes);
    }
    void release() {
        EXPECT_EQ(ferry_store_release(store_, lease_), FERRY_OK) << ferry_last_error();
    }
    void fill(uint32_t object, char value) {
        memset(acquire(object, FERRY_OVERWRITE), value, kBytes);
        release();
    }
    bool holds(uint32_t object, char value) {
        const char* bytes = acquire(object, FERRY_READ);
        const bool all = std::count(bytes, bytes + kBytes, value) == kBytes;
        release();
        return all;
    }
    ferry_store_stats stats() {
        auto stats = sized<ferry_store_stats>();
        EXPECT_EQ(ferry_store_get_stats(store_, &stats), FERRY_OK) << ferry_last_error();
        return stats;
    }

    TemporaryDirectory directory_;
    ferry_path path_;
    ferry_store_options options_ = sized<ferry_store_options>();
    ferry_store* store_ = nullptr;
    uint64_t lease_ = 0;
};

TEST_F(CapiStore, IsAbandonedWithItsLeases) {
    open(4);
    fill(0, 'a');
    char* const held = acquire(1, FERRY_OVERWRITE);
    const char* const read = acquire(0, FERRY_READ);
    memset(held, 'b', kBytes);
    ASSERT_DONE(ferry_store_abandon(store_));
    EXPECT_TRUE(directory_.empty()) << "the files go at once";
    EXPECT_REFUSED(ferry_store_release(store_, lease_), FERRY_BAD_HANDLE, "");
    EXPECT_REFUSED(ferry_store_destroy(std::exchange(store_, nullptr)), FERRY_BAD_HANDLE, "");
    memset(held, 'c', kBytes);
    EXPECT_EQ(std::count(read, read + kBytes, 'a'), kBytes) << "the memory stays";
    // One that was never opened has nothing to leave.
    create();
    ASSERT_DONE(ferry_store_abandon(std::exchange(store_, nullptr)));
}

TEST_F(CapiStore, KeepsMoreThanItsMemory) {
    open(6);
    for (uint32_t i = 0; i < 6; ++i) fill(i, static_cast<char>('a' + i));
    const std::vector<uint32_t> order{5, 3, 1, 0, 2, 4};
    ASSERT_DONE(ferry_store_prefetch(store_, order.data(), order.size()));
    for (const uint32_t i : order) EXPECT_TRUE(holds(i, static_cast<char>('a' + i))) << i;
    ASSERT_DONE(ferry_store_flush(store_));
    ASSERT_DONE(ferry_store_check(store_));
    const ferry_store_stats seen = stats();
    EXPECT_EQ(seen.buffers, 2);
    EXPECT_EQ(seen.acquired, 12);
    EXPECT_GE(seen.reads, 4);
    EXPECT_GE(seen.writes, 6);
    EXPECT_EQ(seen.leased, 0);
    EXPECT_LE(seen.host_bytes, options_.host_bytes);
}

TEST_F(CapiStore, HasHomesInHostMemoryToo) {
    options_.path_count = 0;
    create();
    uint32_t object = ~0u;
    EXPECT_REFUSED(ferry_store_register(store_, 1, FERRY_NVME, &object), FERRY_USAGE, "no path");
    for (uint32_t i = 0; i < 2; ++i)
        ASSERT_DONE(ferry_store_register(store_, kBytes, FERRY_HOST, &object));
    ASSERT_DONE(ferry_store_open(store_));
    EXPECT_TRUE(holds(0, 0)) << "they are zero at first";
    fill(1, 'x');
    EXPECT_TRUE(holds(1, 'x'));
    EXPECT_TRUE(holds(0, 0));
    EXPECT_EQ(stats().nvme_bytes, 0);
}

TEST_F(CapiStore, LeasesAreReleasedOnce) {
    open(3);
    fill(0, 'a');
    const uint64_t first = lease_;
    EXPECT_REFUSED(ferry_store_release(store_, first), FERRY_USAGE, "no such lease");
    fill(1, 'b');  // in the same place
    EXPECT_NE(lease_, first);
    acquire(1, FERRY_READ);
    for (const uint64_t none : {first, uint64_t{0}, UINT64_MAX, uint64_t{1} << 32})
        EXPECT_REFUSED(ferry_store_release(store_, none), FERRY_USAGE, "no such lease");
    EXPECT_EQ(stats().leased, 1);
    EXPECT_REFUSED(ferry_store_destroy(store_), FERRY_USAGE, "leases of the store are held");
    release();
}

TEST_F(CapiStore, RefusesLeasesThatConflict) {
    open(4);
    void* bytes = this;
    uint64_t lease = 5;
    EXPECT_REFUSED(ferry_store_acquire(store_, 0, FERRY_READ, &lease, &bytes), FERRY_USAGE,
                   "object 0");
    EXPECT_EQ(bytes, this);
    EXPECT_EQ(lease, 5u);
    acquire(0, FERRY_OVERWRITE);
    const uint64_t a = lease_;
    EXPECT_EQ(ferry_store_acquire(store_, 0, FERRY_WRITE, &lease, &bytes), FERRY_USAGE);
    EXPECT_EQ(ferry_store_revert(store_, 0), FERRY_USAGE);
    acquire(1, FERRY_OVERWRITE);
    EXPECT_EQ(ferry_store_acquire(store_, 2, FERRY_OVERWRITE, &lease, &bytes), FERRY_DOES_NOT_FIT);
    release();
    EXPECT_EQ(ferry_store_release(store_, a), FERRY_OK);
    for (const uint32_t none : {4u, ~0u}) {
        EXPECT_EQ(ferry_store_acquire(store_, none, FERRY_READ, &lease, &bytes), FERRY_USAGE);
        EXPECT_EQ(ferry_store_prefetch(store_, &none, 1), FERRY_USAGE);
        EXPECT_EQ(ferry_store_revert(store_, none), FERRY_USAGE);
    }
    for (const int32_t none : {-1, 3})
        EXPECT_REFUSED(ferry_store_acquire(store_, 0, none, &lease, &bytes), FERRY_USAGE, "access");
    EXPECT_REFUSED(ferry_store_acquire(store_, 0, 0, nullptr, &bytes), FERRY_USAGE,
                   "lease is NULL");
    EXPECT_REFUSED(ferry_store_acquire(store_, 0, 0, &lease, nullptr), FERRY_USAGE,
                   "bytes is NULL");
    EXPECT_REFUSED(ferry_store_prefetch(store_, nullptr, 1), FERRY_USAGE, "objects is NULL");
    ASSERT_DONE(ferry_store_prefetch(store_, nullptr, 0));
}

TEST_F(CapiStore, HasAnOrderOfCalls) {
    create();
    uint32_t object = 9;
    void* bytes = nullptr;
    auto stats = sized<ferry_store_stats>();
    EXPECT_REFUSED(ferry_store_acquire(store_, 0, 0, &lease_, &bytes), FERRY_USAGE, "not open");
    EXPECT_REFUSED(ferry_store_flush(store_), FERRY_USAGE, "not open");
    EXPECT_REFUSED(ferry_store_get_stats(store_, &stats), FERRY_USAGE, "not open");
    EXPECT_REFUSED(ferry_store_release(store_, 0), FERRY_USAGE, "no such lease");
    EXPECT_REFUSED(ferry_store_open(store_), FERRY_USAGE, "no object");
    for (const int64_t none : {int64_t{0}, int64_t{-1}, INT64_MIN, INT64_MAX})
        EXPECT_REFUSED(ferry_store_register(store_, none, FERRY_NVME, &object), FERRY_USAGE,
                       "bytes");
    EXPECT_REFUSED(ferry_store_register(store_, 1, 2, &object), FERRY_USAGE, "home");
    EXPECT_REFUSED(ferry_store_register(store_, 1, 0, nullptr), FERRY_USAGE, "object is NULL");
    EXPECT_EQ(object, 9u);
    ASSERT_DONE(ferry_store_register(store_, kBytes, FERRY_NVME, &object));
    ASSERT_DONE(ferry_store_open(store_));
    EXPECT_REFUSED(ferry_store_open(store_), FERRY_USAGE, "is open");
    EXPECT_REFUSED(ferry_store_register(store_, 1, FERRY_HOST, &object), FERRY_USAGE, "is open");
}

TEST_F(CapiStore, SaysWhatBudgetWouldDo) {
    options_.host_bytes = kBuffer + 100;
    options_.buffers = 2;
    create();
    uint32_t object = 0;
    ASSERT_DONE(ferry_store_register(store_, kBytes, FERRY_NVME, &object));
    ASSERT_DONE(ferry_store_register(store_, 50, FERRY_HOST, &object));
    EXPECT_REFUSED(ferry_store_open(store_), FERRY_DOES_NOT_FIT, "at least 41024");
    ASSERT_DONE(ferry_store_register(store_, kBuffer + 200, FERRY_HOST, &object));
    EXPECT_REFUSED(ferry_store_open(store_), FERRY_DOES_NOT_FIT, "do not fit into host_bytes");
}

TEST_F(CapiStore, RefusesOptions) {
    const auto refuses = [&](auto change, const char* text) {
        ferry_store_options options = options_;
        change(options);
        EXPECT_REFUSED(ferry_store_create(&options, &store_), FERRY_USAGE, text);
    };
    refuses([](auto& o) { o.host_bytes = 0; }, "host_bytes");
    refuses([](auto& o) { o.buffers = -1; }, "buffers");
    refuses([](auto& o) { o.spare_buffers = -1; }, "spare_buffers");
    refuses([](auto& o) { o.backend = -1; }, "backend");
    refuses([](auto& o) { o.no_verify = 7; }, "no_verify");
    refuses([](auto& o) { o.lock_for = 7; }, "lock_for");
    refuses([](auto& o) { o.path_count = 5000; }, "path_count");
    EXPECT_REFUSED(ferry_store_create(&options_, nullptr), FERRY_USAGE, "store is NULL");
}

TEST_F(CapiStore, ThreadsWaitForEachOther) {
    open(8);
    for (uint32_t i = 0; i < 8; ++i) fill(i, 0);
    constexpr int kRounds = 50;
    const auto work = [&](uint32_t first) {
        for (int round = 0; round < kRounds; ++round) {
            const uint32_t object = first + static_cast<uint32_t>(round % 4) * 2;
            uint64_t lease = 0;
            void* bytes = nullptr;
            ASSERT_EQ(ferry_store_acquire(store_, object, FERRY_WRITE, &lease, &bytes), FERRY_OK)
                << ferry_last_error();
            for (int64_t i = 0; i < kBytes; ++i) ++static_cast<char*>(bytes)[i];
            ASSERT_EQ(ferry_store_release(store_, lease), FERRY_OK) << ferry_last_error();
        }
    };
    std::thread other(work, 1);
    work(0);
    other.join();
    for (uint32_t i = 0; i < 8; ++i)
        EXPECT_TRUE(holds(i, static_cast<char>(kRounds / 4 + (i / 2 < kRounds % 4)))) << i;
}

}  // namespace
}  // namespace ferry
