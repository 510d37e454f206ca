// Files of the caller's through the C ABI.
#include <fcntl.h>
#include <poll.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <thread>

#include "pollable.h"
#include "tests/support/c_abi.h"
#include "tests/support/temporary_directory.h"

namespace ferry {
namespace {

constexpr int64_t kBytes = 100'000;  // whole blocks, and a rest

class CapiFiles : public testing::Test {
protected:
    CapiFiles() : memory_(static_cast<char*>(std::aligned_alloc(4096, 1 << 20)), &std::free) {
        options_.operations_max = 4;
    }
    ~CapiFiles() override {
        if (files_) {
            EXPECT_EQ(ferry_files_destroy(files_), FERRY_OK) << ferry_last_error();
        }
    }
    void create() { ASSERT_DONE(ferry_files_create(&options_, &files_)); }
    uint32_t open(const char* name, int32_t use) {
        uint32_t file = ~0u;
        EXPECT_EQ(ferry_files_open(files_, (directory_ / name).c_str(), use, &file), FERRY_OK)
            << ferry_last_error();
        return file;
    }
    ferry_completion waited() {
        auto completion = sized<ferry_completion>();
        EXPECT_EQ(ferry_files_wait(files_, -1, &completion), FERRY_OK) << ferry_last_error();
        return completion;
    }

    TemporaryDirectory directory_;
    ferry_files_options options_ = sized<ferry_files_options>();
    ferry_files* files_ = nullptr;
    std::unique_ptr<char, decltype(&std::free)> memory_;
};

TEST_F(CapiFiles, WhatIsWrittenIsReadAndStays) {
    create();
    const uint32_t file = open("a", FERRY_FILE_WRITE);
    memset(memory_.get(), 7, kBytes);
    ASSERT_DONE(
        ferry_files_write(files_, file, 3, memory_.get() + 1, kBytes - 1, FERRY_NORMAL, 41));
    const ferry_completion written = waited();
    EXPECT_EQ(written.tag, 41u);
    EXPECT_EQ(written.slot, file);
    EXPECT_EQ(written.bytes, kBytes - 1);
    ASSERT_DONE(ferry_files_flush(files_, file));
    int64_t bytes = 0;
    ASSERT_DONE(ferry_files_size(files_, file, &bytes));
    EXPECT_EQ(bytes, kBytes + 2);
    char* const back = memory_.get() + (512 << 10);
    ASSERT_DONE(ferry_files_read(files_, file, 0, back, kBytes, FERRY_URGENT, 42));
    EXPECT_EQ(waited().status, FERRY_OK);
    EXPECT_EQ(std::string(back, 3), std::string(3, '\0'));
    EXPECT_EQ(std::string(back + 3, kBytes - 3), std::string(kBytes - 3, 7));
    ASSERT_DONE(ferry_files_close(files_, file));
    ASSERT_DONE(ferry_files_destroy(std::exchange(files_, nullptr)));
    EXPECT_EQ(directory_.contents("a").size(), static_cast<size_t>(kBytes) + 2);
}

TEST_F(CapiFiles, ADescriptorOfTheProgramsWorks) {
    create();
    const int mine = ::open((directory_ / "b").c_str(), O_RDWR | O_CREAT, 0600);
    uint32_t file = 0;
    ASSERT_DONE(ferry_files_open_descriptor(files_, mine, &file));
    memcpy(memory_.get(), "ferry", 5);
    ASSERT_DONE(ferry_files_write(files_, file, 0, memory_.get(), 5, FERRY_NORMAL, 0));
    waited();
    char text[6] = {};
    EXPECT_EQ(pread(mine, text, 5, 0), 5);
    EXPECT_STREQ(text, "ferry");
    EXPECT_EQ(close(mine), 0);
    EXPECT_REFUSED(ferry_files_open_descriptor(files_, mine, &file), FERRY_USAGE, "not open");
}

// A program that waits for sockets too need neither poll now and then nor have a thread for it.
TEST_F(CapiFiles, ADescriptorIsReadableUntilAllWerePolled) {
    create();
    directory_.put("a", std::string(kBytes, 'x'));
    const uint32_t file = open("a", FERRY_FILE_READ);
    auto completion = sized<ferry_completion>();
    int32_t descriptor = -1, again = -1;
    ASSERT_DONE(ferry_files_read(files_, file, 0, memory_.get(), 1, FERRY_NORMAL, 0));
    ASSERT_DONE(ferry_files_descriptor(files_, &descriptor));
    ASSERT_DONE(ferry_files_descriptor(files_, &again));
    EXPECT_EQ(again, descriptor);
    const auto readable = [&](int wait_ms) {
        pollfd asked{.fd = descriptor, .events = POLLIN, .revents = 0};
        return ::poll(&asked, 1, wait_ms) == 1;
    };
    EXPECT_TRUE(readable(0)) << "at first, for what ended before";
    waited();
    EXPECT_EQ(ferry_files_wait(files_, 0, &completion), FERRY_AGAIN);
    for (int round = 0; round < 50; ++round) {
        for (uint64_t tag = 0; tag < 3; ++tag)
            ASSERT_DONE(ferry_files_read(files_, file, 0, memory_.get() + tag * kBytes, kBytes,
                                         FERRY_NORMAL, tag));
        for (int ended = 0; ended < 3;) {
            ASSERT_TRUE(readable(60'000)) << "round " << round << ", " << ended << " ended";
            while (ferry_files_wait(files_, 0, &completion) == FERRY_OK) ++ended;
        }
    }
    EXPECT_REFUSED(ferry_files_descriptor(files_, nullptr), FERRY_USAGE, "descriptor is NULL");
}

// A wake() that meets a clear() may write after it: that is read the next time.
TEST(CapiDescriptor, IsSilentOnceAllIsKnown) {
    constexpr int kRounds = 5000;
    capi::PollableExecutor executor;
    const int descriptor = executor.descriptor();
    std::atomic<int> begun = 0, woken = 0;
    std::jthread waker([&] {
        for (int round = 1; round <= kRounds; ++round) {
            while (begun < round) std::this_thread::yield();
            executor.wake();
            woken = round;
        }
    });
    int readable = 0, lost = 0;
    for (int round = 1; round <= kRounds; ++round) {
        pollfd asked{.fd = descriptor, .events = POLLIN, .revents = 0};
        begun = round;
        executor.clear();
        while (woken < round) std::this_thread::yield();
        executor.clear();
        readable += ::poll(&asked, 1, 0);
        executor.wake();
        lost += 1 - ::poll(&asked, 1, 0);
        executor.clear();
    }
    EXPECT_EQ(readable, 0);
    EXPECT_EQ(lost, 0);
}

TEST_F(CapiFiles, TransfersAreBounded) {
    create();
    directory_.put("a", std::string(kBytes, 'x'));
    const uint32_t file = open("a", FERRY_FILE_READ);
    for (uint64_t tag = 0; tag < 4; ++tag)
        ASSERT_DONE(ferry_files_read(files_, file, 0, memory_.get(), kBytes, FERRY_NORMAL, tag));
    EXPECT_EQ(ferry_files_read(files_, file, 0, memory_.get(), 1, FERRY_NORMAL, 4), FERRY_AGAIN);
    EXPECT_REFUSED(ferry_files_close(files_, file), FERRY_USAGE, "have not been polled");
    ASSERT_DONE(ferry_files_cancel(files_));
    for (int i = 0; i < 4; ++i) waited();
    auto completion = sized<ferry_completion>();
    EXPECT_EQ(ferry_files_wait(files_, -1, &completion), FERRY_AGAIN);
    ASSERT_DONE(ferry_files_close(files_, file));
}

TEST_F(CapiFiles, RefusesWhatItWasNotGiven) {
    options_.block_bytes = 100;
    EXPECT_REFUSED(ferry_files_create(&options_, &files_), FERRY_USAGE, "block_bytes");
    options_.block_bytes = 0;
    create();
    uint32_t file = 0;
    EXPECT_REFUSED(ferry_files_open(files_, nullptr, FERRY_FILE_READ, &file), FERRY_USAGE, "path");
    EXPECT_REFUSED(ferry_files_open(files_, "x", 2, &file), FERRY_USAGE, "use");
    EXPECT_REFUSED(ferry_files_open(files_, (directory_ / "none").c_str(), FERRY_FILE_READ, &file),
                   FERRY_IO, "No such file");
    EXPECT_REFUSED(ferry_files_close(files_, 0), FERRY_USAGE, "not open");
    directory_.put("a", "1234");
    file = open("a", FERRY_FILE_READ);
    char* const buffer = memory_.get();
    EXPECT_REFUSED(ferry_files_read(files_, file, 0, nullptr, 1, 0, 0), FERRY_USAGE, "buffer");
    EXPECT_REFUSED(ferry_files_read(files_, file, 0, buffer, 0, 0, 0), FERRY_USAGE, "bytes");
    EXPECT_REFUSED(ferry_files_read(files_, file, -1, buffer, 1, 0, 0), FERRY_USAGE, "offset");
    EXPECT_REFUSED(ferry_files_read(files_, 77, 0, buffer, 1, 0, 0), FERRY_USAGE, "not open");
    EXPECT_REFUSED(ferry_files_read(files_, file, 0, buffer, 5, 0, 0), FERRY_IO, "shorter");
    EXPECT_REFUSED(ferry_files_write(files_, file, 0, buffer, 4, 0, 0), FERRY_USAGE,
                   "opened for reading");
    ferry_files* closed = files_;
    ASSERT_DONE(ferry_files_destroy(std::exchange(files_, nullptr)));
    EXPECT_EQ(ferry_files_close(closed, file), FERRY_BAD_HANDLE);
}

}  // namespace
}  // namespace ferry
