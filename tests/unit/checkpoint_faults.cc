// The n-th operation on files fails, or the process is killed before it, for every n: while
// checkpoints are written, replaced, removed, moved aside and read, and while a later run finds and
// removes what is left. Whatever
// n is, what has a checkpoint's name is whole, and the newest that was there does not get lost.
#include <dlfcn.h>
#include <fcntl.h>
#include <gtest/gtest.h>
#include <liburing.h>
#include <stdio.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <csignal>
#include <cstdarg>
#include <filesystem>
#include <functional>
#include <set>

#include "base/files.h"
#include "base/log.h"
#include "checkpoint/saved.h"
#include "checkpoint/steps.h"
#include "checkpoint_sample.h"
#include "ferry/error.h"
#include "tests/support/quick.h"
#include "tests/support/temporary_directory.h"

namespace {

std::atomic<int> g_left = -1;  // operations until the fault; below 0: none will come
int g_error = 0;               // of the fault; 0: a kill
bool g_once = false;           // it comes and goes, else everything fails from there on
// Transfers are the calls below then, and not a ring's, which nothing here can stop.
bool g_no_ring = false;

// Whether this operation fails.
bool fails() {
    int left = g_left;
    while (left > 0 && !g_left.compare_exchange_weak(left, left - 1)) {
    }
    if (left != 0) return false;
    if (g_error == 0) raise(SIGKILL);
    if (g_once) g_left = -1;
    errno = g_error;
    return true;
}

template <class Call>
Call next(const char* name) {
    return reinterpret_cast<Call>(dlsym(RTLD_NEXT, name));
}

}  // namespace

// In place of the system's, of this program alone.
extern "C" {
ssize_t pwrite(int file, const void* from, size_t bytes, off_t offset) {
    return fails() ? -1 : next<decltype(&pwrite)>("pwrite")(file, from, bytes, offset);
}
int fallocate(int file, int mode, off_t offset, off_t bytes) {
    return fails() ? -1 : next<decltype(&fallocate)>("fallocate")(file, mode, offset, bytes);
}
int io_uring_queue_init_params(unsigned entries, io_uring* ring, io_uring_params* params) {
    using Call = decltype(&io_uring_queue_init_params);
    if (g_no_ring) return -ENOSYS;
    return next<Call>("io_uring_queue_init_params")(entries, ring, params);
}
// Nothing here loses power, and a thousand of them take minutes.
int fsync(int) { return fails() ? -1 : 0; }
int mkdir(const char* path, mode_t mode) {
    return fails() ? -1 : next<decltype(&mkdir)>("mkdir")(path, mode);
}
int rename(const char* from, const char* to) {
    return fails() ? -1 : next<decltype(&rename)>("rename")(from, to);
}
int renameat2(int a, const char* from, int b, const char* to, unsigned flags) {
    return fails() ? -1 : next<decltype(&renameat2)>("renameat2")(a, from, b, to, flags);
}
int unlinkat(int directory, const char* name, int flags) {
    return fails() ? -1 : next<decltype(&unlinkat)>("unlinkat")(directory, name, flags);
}
ssize_t pread(int file, void* to, size_t bytes, off_t offset) {
    return fails() ? -1 : next<decltype(&pread)>("pread")(file, to, bytes, offset);
}
int open(const char* path, int flags, ...) {
    va_list list;
    va_start(list, flags);
    const mode_t mode = va_arg(list, mode_t);
    va_end(list);
    return fails() ? -1 : next<decltype(&open)>("open")(path, flags, mode);
}
}

namespace ferry::checkpoint {
namespace {

using test::write_sample;

constexpr int kDone = 0, kFailed = 1, kWrong = 2;

// Uses the directory as a run does: the last step is written twice.
void run_in(const std::string& directory, int64_t first) {
    Steps steps(directory);
    for (int64_t step = first; step < first + 3; ++step) {
        write_sample(steps, step, static_cast<float>(step));
        steps.retain({.last = 2});
    }
    write_sample(steps, first + 2, 100);
}

// In a process of its own, with a fault at operation n.
int run_with_fault(const std::function<void()>& run, int n, int error, bool once) {
    const pid_t child = fork();
    if (child == 0) {
        static constexpr LogSink kQuiet{.line = [](LogLevel, Warning, std::string_view) {}};
        set_log_sink(&kQuiet);
        g_no_ring = true;
        g_left = n;
        g_error = error;
        g_once = once;
        int code = kDone;
        try {
            run();
        } catch (const Error&) {
            code = kFailed;
        }
        const bool came = error != 0 && g_left <= 0 && (once ? g_left < 0 : true);
        _exit(code == kDone && came ? kFailed : code);
    }
    int status = 0;
    EXPECT_EQ(waitpid(child, &status, 0), child);
    EXPECT_TRUE(WIFEXITED(status) || (error == 0 && WTERMSIG(status) == SIGKILL)) << n;
    return WIFEXITED(status) ? WEXITSTATUS(status) : kFailed;
}

// The newest step that is there; each of them is whole.
int64_t newest_whole(const std::string& directory) {
    int64_t newest = 0;
    for (const Step& step : steps_in(directory)) {
        const Saved saved(step.path);
        for (const Shard& shard : saved.manifest().shards)
            check_shard(step.path, shard, [](int64_t) {});
        newest = step.step;
    }
    return newest;
}

std::string memory_directory() { return access("/dev/shm", W_OK) == 0 ? "/dev/shm" : "/var/tmp"; }

int64_t leftovers_in(const std::string& directory) {
    int64_t count = 0;
    for (const auto& entry : std::filesystem::directory_iterator(directory))
        count += is_leftover(entry.path().filename().string());
    return count;
}

// `before` leaves steps 2 and 3, and perhaps more, in the directory.
using Before = std::function<void(const std::string& directory)>;
void check_every_operation(int error, bool once, const Before& before) {
    const TemporaryDirectory beginning(memory_directory());
    before(beginning.path());
    for (int n = 0;; n += is_quick() ? 4 : 1) {
        SCOPED_TRACE(n);
        const TemporaryDirectory directory(memory_directory());
        std::filesystem::copy(beginning.path(), directory.path(),
                              std::filesystem::copy_options::recursive);
        const int code = run_with_fault([&] { run_in(directory.path(), 4); }, n, error, once);
        EXPECT_GE(newest_whole(directory.path()), 3);
        // The next run goes on, and clears up.
        run_in(directory.path(), 7);
        EXPECT_EQ(newest_whole(directory.path()), 9);
        EXPECT_EQ(std::distance(std::filesystem::directory_iterator(directory.path()), {}), 2);
        if (code == kDone) {
            EXPECT_GT(n, 50);
            return;
        }
        ASSERT_LT(n, 2000);
    }
}

void finish(const std::string& directory) { run_in(directory, 1); }

// Killed twice, so that the next run clears up: while it wrote, and while it removed.
void leave_what_kills_leave(const std::string& directory) {
    finish(directory);
    const auto write = [&] {
        Steps steps(directory);
        write_sample(steps, 4);
    };
    const auto leave = [&](const std::function<void()>& run) {
        const int64_t before = leftovers_in(directory);
        for (int n = 0; leftovers_in(directory) == before; ++n) {
            ASSERT_LT(n, 100);
            run_with_fault(run, n, 0, false);
        }
    };
    leave(write);
    leave([&] { remove_directory(directory + "/" + name_of_step(2)); });
    EXPECT_EQ(leftovers_in(directory), 2);
}

TEST(EveryFileOperation, MayBeTheLast) { check_every_operation(0, false, finish); }
TEST(EveryFileOperation, MayFail) { check_every_operation(EIO, true, finish); }
TEST(EveryFileOperation, MayFindTheDiskFullFromThereOn) {
    check_every_operation(ENOSPC, false, finish);
}

TEST(EveryFileOperation, OfARunThatClearsUpMayBeTheLast) {
    check_every_operation(0, false, leave_what_kills_leave);
}
TEST(EveryFileOperation, OfARunThatClearsUpMayFail) {
    check_every_operation(EIO, true, leave_what_kills_leave);
}

// A run that begins afresh moves those of a finished run aside, oldest first.
void check_moving_aside(int error, bool once) {
    for (int n = 0;; ++n) {
        SCOPED_TRACE(n);
        const TemporaryDirectory directory(memory_directory());
        finish(directory.path());
        const auto move = [&] {
            Steps steps(directory.path());
            steps.move_aside();
        };
        const int code = run_with_fault(move, n, error, once);
        std::set<int64_t> found;
        std::vector<std::string> all = moved_aside_in(directory.path());
        all.push_back(directory.path());
        for (const std::string& place : all) {
            newest_whole(place);
            for (const Step& step : steps_in(place)) EXPECT_TRUE(found.insert(step.step).second);
        }
        EXPECT_EQ(found, (std::set<int64_t>{2, 3}));
        // What is still there ends with the newest, which says that its run has ended.
        EXPECT_TRUE(newest_whole(directory.path()) == 3 || steps_in(directory.path()).empty());
        move();
        EXPECT_TRUE(steps_in(directory.path()).empty());
        if (code == kDone) {
            EXPECT_GT(n, 4);
            return;
        }
        ASSERT_LT(n, 100);
    }
}

TEST(EveryFileOperation, OfMovingAsideMayBeTheLast) { check_moving_aside(0, false); }
TEST(EveryFileOperation, OfMovingAsideMayFail) { check_moving_aside(EIO, true); }

// A resume comes to the values that were written, or says that it does not; nothing changes on the
// disk.
TEST(EveryFileOperation, OfAResumeMayFail) {
    const TemporaryDirectory directory(memory_directory());
    finish(directory.path());
    const auto resume = [&] {
        Steps steps(directory.path());
        const Saved saved(steps_in(directory.path()).back().path);
        for (const Shard& shard : saved.manifest().shards)
            check_shard(saved.path(), shard, [](int64_t) {});
        std::vector<float> values(6);
        saved.read(*saved.find("w"), 0, std::as_writable_bytes(std::span(values)));
        if (values != std::vector<float>(6, 100)) _exit(kWrong);
    };
    for (const int error : {0, EIO}) {
        int n = 0;
        for (int code = kFailed; code != kDone; ++n) {
            code = run_with_fault(resume, n, error, true);
            ASSERT_NE(code, kWrong) << n;
            ASSERT_LT(n, 200);
            ASSERT_EQ(newest_whole(directory.path()), 3);
        }
        EXPECT_GT(n, 10);
    }
}

}  // namespace
}  // namespace ferry::checkpoint
