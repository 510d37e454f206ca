// Probes of real paths, and the settings that follow from them.
#include "probe.h"

#include <dirent.h>
#include <fcntl.h>
#include <gtest/gtest.h>
#include <pthread.h>
#include <sched.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <fstream>
#include <set>
#include <thread>
#include <vector>

#include <linux/magic.h>

#include "backend.h"
#include "buffer.h"
#include "tests/support/temporary_directory.h"

namespace ferry::aio {
namespace {

class File {
public:
    explicit File(const std::string& name, int flags = O_DIRECT)
        : file_(open(name.c_str(), O_RDWR | O_CREAT | flags, 0600)) {
        if (file_ < 0) file_ = open(name.c_str(), O_RDWR | O_CREAT, 0600);  // an older tmpfs
    }
    ~File() { close(file_); }
    int get() const { return file_; }

private:
    int file_;
};

bool in_memory(const std::string& path) {
    struct statfs status {};
    return statfs(path.c_str(), &status) == 0 && status.f_type == TMPFS_MAGIC;
}

TEST(Probe, MemoryCopiesAndADiskDoesNot) {
    const TemporaryDirectory memory("/dev/shm"), disk;
    if (!in_memory(memory.path())) GTEST_SKIP() << "/dev/shm is no tmpfs here";
    Probe probe;
    EXPECT_TRUE(reads_only_copy(probe, File(memory / "f").get(), 0, kMiB));
    EXPECT_TRUE(reads_only_copy(probe, File(disk / "cached", 0).get(), 0, kMiB)) << "page cache";
    const File direct(disk / "f");
    if (in_memory(disk.path()) || direct.get() < 0) GTEST_SKIP() << "/var/tmp is no disk here";
    EXPECT_FALSE(reads_only_copy(probe, direct.get(), 0, kMiB));
    EXPECT_EQ(probe.bytes_written, 3 * kMiB);
}

TEST(Probe, ABusyMachineGivesTheSameAnswer) {
    const TemporaryDirectory memory("/dev/shm"), disk;
    const File copied(memory / "f"), direct(disk / "f");
    if (!in_memory(memory.path()) || in_memory(disk.path()))
        GTEST_SKIP() << "/dev/shm is no tmpfs, or /var/tmp is one";
    std::atomic<bool> stop = false;
    std::vector<std::thread> busy;
    for (unsigned i = 0; i < 4 * std::thread::hardware_concurrency(); ++i) {
        busy.emplace_back([&] {
            while (!stop) {
            }
        });
    }
    Probe probe;
    int disks = 0, memories = 0;
    constexpr int kTries = 60;
    for (int i = 0; i < kTries; ++i) {
        memories += reads_only_copy(probe, copied.get(), 0, 256 * kKiB);
        disks += !reads_only_copy(probe, direct.get(), 0, 256 * kKiB);
    }
    stop = true;
    for (std::thread& thread : busy) thread.join();
    EXPECT_EQ(memories, kTries);
    EXPECT_EQ(disks, kTries);
}

// The threads that probe run before all others of the machine while it lives: between two of their
// steps no other work comes, however busy it is.
class BeforeAllOthers {
public:
    BeforeAllOthers() {
        const sched_param first{.sched_priority = 1};
        pthread_getschedparam(pthread_self(), &policy_, &before_);
        error_ = pthread_setschedparam(pthread_self(), SCHED_FIFO, &first);
    }
    ~BeforeAllOthers() { pthread_setschedparam(pthread_self(), policy_, &before_); }
    BeforeAllOthers(const BeforeAllOthers&) = delete;
    BeforeAllOthers& operator=(const BeforeAllOthers&) = delete;
    int error() const { return error_; }

private:
    sched_param before_{};
    int policy_ = SCHED_OTHER, error_ = 0;
};

// tmpfs takes one lock a file, ext4 does not.
TEST(Probe, WritersTakeTurnsWhereAFileHasOneLock) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
    GTEST_SKIP() << "what a sanitizer adds to a small write hides what it waits for";
#endif
    const BeforeAllOthers first;
    if (first.error() != 0)
        GTEST_SKIP() << "other work would decide, and may not be put off: "
                     << strerror(first.error());
    const TemporaryDirectory memory("/dev/shm"), disk;
    Probe probe;
    const auto found = [&](const TemporaryDirectory& where, int64_t bytes, bool expected) {
        const File one(where / "one"), other(where / "other");
        // What lies below this machine, if it is a virtual one, still has its pauses.
        for (int tries = 0; tries < 60; ++tries) {
            for (const File* file : {&one, &other})
                EXPECT_EQ(fallocate(file->get(), 0, 0, bytes), 0);
            const int64_t before = probe.bytes_written;
            const bool turns = writers_take_turns(probe, one.get(), other.get(), bytes);
            EXPECT_LE(probe.bytes_written - before, kLargeWritesMax * bytes);
            if (turns == expected) return true;
        }
        return false;
    };
    if (in_memory(memory.path())) {
        EXPECT_TRUE(found(memory, 8 * kMiB, true));
    }
    struct statfs status {};
    if (statfs(disk.path().c_str(), &status) == 0 && status.f_type == EXT4_SUPER_MAGIC) {
        EXPECT_TRUE(found(disk, 2 * kMiB, false));
    }
    EXPECT_GT(probe.bytes_written, 0);
}

int kernel_workers() {
    int count = 0;
    DIR* tasks = opendir("/proc/self/task");
    while (const dirent* task = readdir(tasks)) {
        std::string name;
        std::ifstream(std::string("/proc/self/task/") + task->d_name + "/comm") >> name;
        count += name.starts_with("iou-wrk");
    }
    closedir(tasks);
    return count;
}

// Every byte comes back when several of the kernel's threads move them, and no more than allowed.
TEST(Probe, WorkersAreAsManyAsAllowed) {
    if (!why_no_uring().empty()) GTEST_SKIP() << "no io_uring here: " << why_no_uring();
    constexpr int kDepth = 32, kWorkers = 3;
    constexpr int64_t kBlock = 256 * kKiB;
    const TemporaryDirectory memory("/dev/shm");
    const File file(memory / "f");
    const AlignedBuffer buffer = aligned_buffer(4096, kDepth * kBlock);
    const auto backend =
        make_uring_backend({.files = {file.get()},
                            .depth = kDepth,
                            .registered = {{buffer.get(), static_cast<size_t>(kDepth * kBlock)}},
                            .workers = kWorkers});
    const auto all = [&](Verb verb) {
        std::vector<Transfer> transfers;
        for (uint32_t i = 0; i < kDepth; ++i)
            transfers.push_back({.verb = verb,
                                 .id = i,
                                 .offset = i * kBlock,
                                 .data = buffer.get() + i * kBlock,
                                 .size_bytes = kBlock});
        EXPECT_EQ(backend->submit(transfers), kDepth);
        std::set<uint32_t> back;
        std::vector<Completion> completions(kDepth);
        while (back.size() < kDepth) {
            const int count = backend->reap(completions, kForever);
            for (int i = 0; i < count; ++i) {
                EXPECT_EQ(completions[static_cast<size_t>(i)].result, kBlock);
                back.insert(completions[static_cast<size_t>(i)].id);
            }
        }
    };
    for (int round = 1; round <= 5; ++round) {
        for (int i = 0; i < kDepth; ++i)
            memset(buffer.get() + i * kBlock, round + i, static_cast<size_t>(kBlock));
        all(Verb::write);
        memset(buffer.get(), 0, static_cast<size_t>(kDepth * kBlock));
        all(Verb::read);
        for (int64_t at = 0; at < kDepth * kBlock; at += 512)
            ASSERT_EQ(buffer.get()[at], static_cast<std::byte>(round + at / kBlock));
    }
    // Some kernels are content with one.
    EXPECT_GE(kernel_workers(), 1);
    EXPECT_LE(kernel_workers(), kWorkers);
}

}  // namespace
}  // namespace ferry::aio
