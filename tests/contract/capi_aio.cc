// Slots of files and pinned memory through the C ABI.
#include <poll.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <vector>

#include "tests/support/c_abi.h"
#include "tests/support/temporary_directory.h"

namespace ferry {
namespace {

constexpr int64_t kSlot = 64 << 10;

class CapiAio : public testing::Test {
protected:
    CapiAio() : path_(path_at(directory_.path())), memory_(aligned(2 * kSlot)) {
        class_.slot_bytes = kSlot;
        class_.slots = 2;
        options_.paths = &path_;
        options_.path_count = 1;
        options_.classes = &class_;
        options_.class_count = 1;
        options_.operations_max = 4;
    }
    ~CapiAio() override {
        if (aio_) {
            EXPECT_EQ(ferry_aio_close(aio_), FERRY_OK) << ferry_last_error();
        }
        EXPECT_TRUE(directory_.empty());
    }

    using Memory = std::unique_ptr<char, decltype(&std::free)>;
    static Memory aligned(size_t bytes) {
        return {static_cast<char*>(std::aligned_alloc(4096, bytes)), &std::free};
    }
    void open() { ASSERT_DONE(ferry_aio_open(&options_, &aio_)); }
    uint32_t slot() {
        uint32_t slot = ~0u;
        EXPECT_EQ(ferry_aio_allocate(aio_, 0, &slot), FERRY_OK) << ferry_last_error();
        return slot;
    }
    ferry_completion waited() {
        auto completion = sized<ferry_completion>();
        EXPECT_EQ(ferry_aio_wait(aio_, -1, &completion), FERRY_OK) << ferry_last_error();
        return completion;
    }

    TemporaryDirectory directory_;
    ferry_path path_;
    ferry_slot_class class_ = sized<ferry_slot_class>();
    ferry_aio_options options_ = sized<ferry_aio_options>();
    ferry_aio* aio_ = nullptr;
    Memory memory_;
};

TEST_F(CapiAio, WhatIsWrittenIsRead) {
    open();
    int64_t bytes = 0;
    ASSERT_DONE(ferry_aio_alignment(aio_, &bytes));
    EXPECT_EQ(kSlot % bytes, 0);
    ASSERT_DONE(ferry_aio_slot_bytes(aio_, 0, &bytes));
    EXPECT_EQ(bytes, kSlot);
    const uint32_t mine = slot();
    memset(memory_.get(), 7, kSlot);
    ASSERT_DONE(ferry_aio_write(aio_, mine, 0, memory_.get(), kSlot, FERRY_NORMAL, 41));
    EXPECT_EQ(waited().tag, 41u);
    ASSERT_DONE(ferry_aio_flush(aio_));
    auto none = sized<ferry_completion>();
    pollfd ended{.fd = -1, .events = POLLIN, .revents = 0};
    ASSERT_DONE(ferry_aio_descriptor(aio_, &ended.fd));
    EXPECT_EQ(ferry_aio_poll(aio_, &none), FERRY_AGAIN);
    ASSERT_DONE(ferry_aio_read(aio_, mine, 4096, memory_.get() + kSlot, 8192, FERRY_URGENT, 42));
    EXPECT_EQ(::poll(&ended, 1, 60'000), 1);
    const ferry_completion read = waited();
    EXPECT_EQ(read.tag, 42u);
    EXPECT_EQ(read.slot, mine);
    EXPECT_EQ(read.status, FERRY_OK);
    EXPECT_EQ(read.bytes, 8192);
    EXPECT_EQ(memcmp(memory_.get(), memory_.get() + kSlot, 8192), 0);
    auto stats = sized<ferry_path_stats>();
    ASSERT_DONE(ferry_aio_stats(aio_, 0, &stats));
    EXPECT_EQ(stats.bytes_written, kSlot);
    EXPECT_EQ(stats.bytes_read, 8192);
    ASSERT_DONE(ferry_aio_free(aio_, mine));
}

TEST_F(CapiAio, NothingUnderWayIsSaidAtOnce) {
    open();
    auto completion = sized<ferry_completion>();
    EXPECT_EQ(ferry_aio_poll(aio_, &completion), FERRY_AGAIN);
    EXPECT_EQ(ferry_aio_wait(aio_, -1, &completion), FERRY_AGAIN);
    EXPECT_EQ(ferry_aio_wait(aio_, INT64_MAX, &completion), FERRY_AGAIN);
    int32_t transfers = -1;
    ASSERT_DONE(ferry_aio_in_flight(aio_, &transfers));
    EXPECT_EQ(transfers, 0);
}

TEST_F(CapiAio, SlotsAndTransfersAreBounded) {
    open();
    const uint32_t a = slot(), b = slot();
    uint32_t none = 77;
    EXPECT_EQ(ferry_aio_allocate(aio_, 0, &none), FERRY_AGAIN);
    EXPECT_EQ(none, 77u);
    for (uint64_t tag = 0; tag < 4; ++tag)
        ASSERT_DONE(ferry_aio_read(aio_, a, 0, memory_.get(), kSlot, FERRY_NORMAL, tag));
    EXPECT_EQ(ferry_aio_read(aio_, b, 0, memory_.get(), kSlot, FERRY_NORMAL, 4), FERRY_AGAIN);
    EXPECT_REFUSED(ferry_aio_free(aio_, a), FERRY_USAGE, "have not been polled");
    for (int i = 0; i < 4; ++i) waited();
    ASSERT_DONE(ferry_aio_free(aio_, a));
    EXPECT_REFUSED(ferry_aio_free(aio_, a), FERRY_USAGE, "not allocated");
    EXPECT_REFUSED(ferry_aio_read(aio_, a, 0, memory_.get(), kSlot, FERRY_NORMAL, 0), FERRY_USAGE,
                   "not allocated");
}

TEST_F(CapiAio, CloseWaitsForWhatIsUnderWay) {
    open();
    const uint32_t mine = slot();
    for (uint64_t tag = 0; tag < 4; ++tag)
        ASSERT_DONE(ferry_aio_write(aio_, mine, 0, memory_.get(), kSlot, FERRY_BACKGROUND, tag));
    ASSERT_DONE(ferry_aio_cancel(aio_));
}

TEST_F(CapiAio, RefusesTransfersThatReachElsewhere) {
    open();
    const uint32_t mine = slot();
    char* const memory = memory_.get();
    const auto refuses = [&](uint32_t slot, int64_t offset, void* buffer, int64_t bytes,
                             int32_t priority, const char* text) {
        EXPECT_REFUSED(ferry_aio_read(aio_, slot, offset, buffer, bytes, priority, 0), FERRY_USAGE,
                       text);
        EXPECT_REFUSED(ferry_aio_write(aio_, slot, offset, buffer, bytes, priority, 0), FERRY_USAGE,
                       text);
    };
    refuses(mine + 1000, 0, memory, kSlot, 0, "not allocated");
    refuses(mine, 0, nullptr, kSlot, 0, "buffer is NULL");
    refuses(mine, 0, memory, 0, 0, "bytes");
    refuses(mine, 0, memory, -4096, 0, "bytes");
    refuses(mine, 0, memory, INT64_MAX, 0, "bytes");
    refuses(mine, 0, memory, kSlot + 4096, 0, "bytes");
    refuses(mine, 4096, memory, kSlot, 0, "offset");
    refuses(mine, -4096, memory, 4096, 0, "offset");
    refuses(mine, INT64_MIN, memory, 4096, 0, "offset");
    refuses(mine, 1, memory, 4096, 0, "offset is not aligned");
    refuses(mine, 0, memory + 8, 4096, 0, "address is not aligned");
    refuses(mine, 0, memory, 100, 0, "bytes is not aligned");
    refuses(mine, 0, memory, 4096, 3, "priority");
    refuses(mine, 0, memory, 4096, -1, "priority");
    EXPECT_REFUSED(ferry_aio_allocate(aio_, 1, nullptr), FERRY_USAGE, "slot is NULL");
    uint32_t slot = 0;
    int64_t bytes = 0;
    for (const int32_t none : {-1, 1, INT32_MAX}) {
        EXPECT_REFUSED(ferry_aio_allocate(aio_, none, &slot), FERRY_USAGE, "slot_class");
        EXPECT_REFUSED(ferry_aio_slot_bytes(aio_, none, &bytes), FERRY_USAGE, "slot_class");
    }
    auto stats = sized<ferry_path_stats>();
    EXPECT_REFUSED(ferry_aio_stats(aio_, 1, &stats), FERRY_USAGE, "path");
    EXPECT_REFUSED(ferry_aio_stats(aio_, SIZE_MAX, &stats), FERRY_USAGE, "path");
    EXPECT_REFUSED(ferry_aio_poll(aio_, nullptr), FERRY_USAGE, "completion is NULL");
}

TEST_F(CapiAio, RefusesOptions) {
    const auto refuses = [&](auto change, const char* text) {
        ferry_aio_options options = options_;
        ferry_path path = path_;
        ferry_slot_class one = class_;
        options.paths = &path;
        options.classes = &one;
        change(options, path, one);
        EXPECT_REFUSED(ferry_aio_open(&options, &aio_), FERRY_USAGE, text);
        EXPECT_EQ(aio_, nullptr);
    };
    refuses([](auto& o, auto&, auto&) { o.paths = nullptr; }, "paths is NULL");
    refuses([](auto& o, auto&, auto&) { o.path_count = SIZE_MAX; }, "path_count");
    refuses([](auto& o, auto&, auto&) { o.path_count = 0; }, "no storage path");
    refuses([](auto& o, auto&, auto&) { o.classes = nullptr; }, "classes is NULL");
    refuses([](auto& o, auto&, auto&) { o.class_count = 0; }, "classes");
    refuses([](auto& o, auto&, auto&) { o.backend = 3; }, "backend");
    refuses([](auto& o, auto&, auto&) { o.queue_depth = -1; }, "queue_depth");
    refuses([](auto& o, auto&, auto&) { o.buffered = 2; }, "buffered");
    refuses([](auto&, auto& p, auto&) { p.path = nullptr; }, "path is NULL");
    refuses([](auto&, auto& p, auto&) { p.size = 4; }, "size is wrong");
    refuses([](auto&, auto& p, auto&) { p.size_bytes = -1; }, "size_bytes");
    refuses([](auto&, auto&, auto& c) { c.slot_bytes = 0; }, "slot_bytes");
    refuses([](auto&, auto&, auto& c) { c.slots = -1; }, "slots");
    EXPECT_REFUSED(ferry_aio_open(&options_, nullptr), FERRY_USAGE, "aio is NULL");
    path_.path = "/nowhere/at/all";
    EXPECT_NE(ferry_aio_open(&options_, &aio_), FERRY_OK);
    EXPECT_NE(std::string(ferry_last_error()).find("/nowhere/at/all"), std::string::npos);
}

// ---------------------------------------------------------------- pinned memory

TEST(CapiPool, KeepsToItsBudget) {
    auto options = sized<ferry_pool_options>();
    options.budget_bytes = 8 << 20;
    options.threads = 1;
    ferry_pool* pool = nullptr;
    ASSERT_DONE(ferry_pool_create(&options, &pool));
    void* memory = nullptr;
    ASSERT_DONE(ferry_pool_reserve(pool, "first", 6 << 20, &memory));
    EXPECT_EQ(reinterpret_cast<uintptr_t>(memory) % (2 << 20), 0u);
    memset(memory, 1, 6 << 20);
    void* const before = memory;
    EXPECT_REFUSED(ferry_pool_reserve(pool, "second", 4 << 20, &memory), FERRY_DOES_NOT_FIT,
                   "2097152 bytes are left of 8388608");
    EXPECT_EQ(memory, before);
    for (const int64_t none : {int64_t{0}, int64_t{-1}, INT64_MIN, INT64_MAX})
        EXPECT_REFUSED(ferry_pool_reserve(pool, "third", none, &memory), FERRY_USAGE, "bytes");
    EXPECT_REFUSED(ferry_pool_reserve(pool, nullptr, 1, &memory), FERRY_USAGE, "name is NULL");
    EXPECT_REFUSED(ferry_pool_reserve(pool, "x", 1, nullptr), FERRY_USAGE, "memory is NULL");
    ASSERT_DONE(ferry_pool_seal(pool));
    EXPECT_REFUSED(ferry_pool_reserve(pool, "late", 1, &memory), FERRY_USAGE, "sealed");
    int64_t bytes = 0;
    ASSERT_DONE(ferry_pool_reserved_bytes(pool, &bytes));
    EXPECT_EQ(bytes, 6 << 20);
    ASSERT_DONE(ferry_pool_destroy(pool));
}

TEST(CapiPool, RefusesOptions) {
    ferry_pool* pool = nullptr;
    const auto refuses = [&](auto change, const char* text) {
        auto options = sized<ferry_pool_options>();
        options.budget_bytes = 1 << 20;
        change(options);
        EXPECT_REFUSED(ferry_pool_create(&options, &pool), FERRY_USAGE, text);
    };
    refuses([](auto& o) { o.budget_bytes = 0; }, "budget_bytes");
    refuses([](auto& o) { o.threads = -1; }, "threads");
    refuses([](auto& o) { o.lock_for = 2; }, "lock_for");
    refuses([](auto& o) { o.gpu = -1; }, "gpu");
}

}  // namespace
}  // namespace ferry
