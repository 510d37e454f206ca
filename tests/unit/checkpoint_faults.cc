// The n-th operation on files fails, or the process is killed before it, for every n: while
// checkpoints are written, replaced and removed, and while a later run finds what is left. Whatever
// n is, what has a checkpoint's name is whole, and the newest that was there does not get lost.
#include <dlfcn.h>
#include <fcntl.h>
#include <gtest/gtest.h>
#include <stdio.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstdarg>
#include <filesystem>

#include "checkpoint/saved.h"
#include "checkpoint/steps.h"
#include "checkpoint_sample.h"
#include "ferry/error.h"
#include "tests/support/temporary_directory.h"

namespace {

int g_left = -1;      // operations until the fault; below 0: none will come
int g_error = 0;      // of the fault; 0: a kill
bool g_once = false;  // it comes and goes, else everything fails from there on

// Whether this operation fails.
bool fails() {
    if (g_left < 0) return false;
    if (g_left > 0) {
        --g_left;
        return false;
    }
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

constexpr int kDone = 0, kFailed = 1;

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
int run_with_fault(const std::string& directory, int64_t first, int n, int error, bool once) {
    const pid_t child = fork();
    if (child == 0) {
        g_left = n;
        g_error = error;
        g_once = once;
        int code = kDone;
        try {
            run_in(directory, first);
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

void check_every_operation(int error, bool once) {
    for (int n = 0;; ++n) {
        SCOPED_TRACE(n);
        const TemporaryDirectory directory(access("/dev/shm", W_OK) == 0 ? "/dev/shm" : "/var/tmp");
        run_in(directory.path(), 1);  // steps 2 and 3 are there
        const int code = run_with_fault(directory.path(), 4, n, error, once);
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

TEST(EveryFileOperation, MayBeTheLast) { check_every_operation(0, false); }
TEST(EveryFileOperation, MayFail) { check_every_operation(EIO, true); }
TEST(EveryFileOperation, MayFindTheDiskFullFromThereOn) { check_every_operation(ENOSPC, false); }

}  // namespace
}  // namespace ferry::checkpoint
