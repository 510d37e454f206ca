// kill -9 on the real kernel, after every completed operation and at every system call of every
// thread, from the first of open() to the last of closing. Whatever a killed run leaves is
// recognised, refused, removed or taken over as asked, and what is not ferry's stays as it was.
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/ptrace.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <map>
#include <stdexcept>
#include <vector>

#include "aio/buffer.h"
#include "ferry/aio.h"
#include "tests/support/child.h"
#include "tests/support/layout_bytes.h"
#include "tests/support/quick.h"
#include "tests/support/temporary_directory.h"

namespace ferry::aio {
namespace {

constexpr int64_t kSlotBytes = 16384;
constexpr size_t kSlots = 4;
constexpr char kPrecious[] = "not ferry's, and longer than a header's magic";

// The number of files is fixed, so that every run makes the same system calls.
VolumeOptions options(const std::string& path, Leftover leftover) {
    const int files = path.starts_with("/dev/shm") ? 3 : 1;
    return {.paths = {{.path = path, .size_bytes = kMiB, .files = files}},
            .classes = {{"a", kSlotBytes, kSlots}},
            .block_bytes = 8192,
            .queue_depth = 4,
            .operations_max = 8,
            .leftover = leftover,
            .run_id = 7};
}

struct Dies {
    int after;  // completed operations
};

// Writes a few versions of every slot, reads them back, closes.
int write_and_read(const std::string& path, Leftover leftover, Dies dies) {
    auto executor = make_thread_executor();
    auto volume = Volume::open(options(path, leftover), *executor);
    const AlignedBuffer memory = aligned_buffer(4096, kSlotBytes * static_cast<int64_t>(kSlots));
    std::vector<Operation> operations(kSlots);
    std::vector<SlotId> slots;
    for (size_t i = 0; i < kSlots; ++i) slots.push_back(volume->allocate(0));
    const auto all = [&](Kind kind) {
        for (size_t i = 0; i < kSlots; ++i) {
            operations[i] = {.kind = kind,
                             .slot = slots[i],
                             .buffer = {memory.get() + i * kSlotBytes, kSlotBytes}};
            volume->submit(operations[i]);
        }
        for (size_t done = 0; done < kSlots;) {
            if (dies.after-- == 0) kill(getpid(), SIGKILL);
            Operation* operation = nullptr;
            while (!(operation = volume->poll())) executor->wait(kForever);
            if (operation->state != State::done) return false;
            ++done;
        }
        return true;
    };
    for (int version = 1; version <= 3; ++version) {
        memset(memory.get(), version, kSlotBytes * kSlots);
        if (!all(Kind::write)) return 1;
        volume->flush();
        memset(memory.get(), 0, kSlotBytes * kSlots);
        if (!all(Kind::read)) return 2;
        for (size_t i = 0; i < kSlotBytes * kSlots; ++i)
            if (memory.get()[i] != static_cast<std::byte>(version)) return 3;
    }
    if (dies.after-- == 0) kill(getpid(), SIGKILL);
    return 0;
}

constexpr Dies kNever{1 << 30};

// Checks what must hold for a path, whatever became of its last user.
void check_after_kill(const TemporaryDirectory& directory, int number) {
    SCOPED_TRACE("killed at " + std::to_string(number));
    EXPECT_EQ(directory.contents("ferry.notes"), kPrecious);
    auto executor = make_thread_executor();
    const std::string header = directory.contents("ferry.volume");
    if (header.empty()) {
        EXPECT_FALSE(directory.has("ferry.slots0")) << "a slot file without a header";
    } else {
        try {
            Volume::open(options(directory.path(), Leftover::refuse), *executor);
            ADD_FAILURE() << "a leftover was not refused";
        } catch (const Error& error) {
            EXPECT_EQ(error.trouble(), Trouble::usage);
            EXPECT_NE(std::string(error.what()).find("killed run"), std::string::npos)
                << error.what();
        }
        EXPECT_EQ(directory.contents("ferry.volume"), header) << "refusing changed something";
    }
    const Leftover next = number % 2 ? Leftover::reuse : Leftover::remove;
    EXPECT_EQ(write_and_read(directory.path(), next, kNever), 0);
    EXPECT_FALSE(directory.has("ferry.volume"));
    EXPECT_FALSE(directory.has("ferry.slots0"));
    EXPECT_EQ(directory.contents("ferry.notes"), kPrecious);
}

class Killed : public testing::TestWithParam<const char*> {
protected:
    void SetUp() override { setenv("FERRY_LOG", "warn", 1); }
};

TEST_P(Killed, AfterEveryCompletedOperation) {
    const TemporaryDirectory directory(GetParam());
    directory.put("ferry.notes", kPrecious);
    int after = 0;
    for (bool killed = true; killed; ++after) {
        const int status =
            in_child([&] { return write_and_read(directory.path(), Leftover::remove, {after}); });
        killed = WIFSIGNALED(status);
        if (!killed) {
            ASSERT_EQ(WEXITSTATUS(status), 0);
        }
        check_after_kill(directory, after);
    }
    EXPECT_GT(after, 24);
}

// Follows a process and its threads, and kills it at the n-th system call of them all.
class TracedChild {
public:
    // False: this kernel lets nobody trace. The child ends with what `work` returns.
    template <class Work>
    bool start(Work work) {
        fflush(nullptr);
        child_ = fork();
        if (child_ == 0) {
            if (ptrace(PTRACE_TRACEME, 0, nullptr, nullptr) != 0) _exit(77);
            raise(SIGSTOP);
            _exit(work());
        }
        int status = 0;
        waitpid(child_, &status, 0);
        if (!WIFSTOPPED(status)) return false;
        constexpr long kOptions = PTRACE_O_TRACESYSGOOD | PTRACE_O_TRACECLONE | PTRACE_O_EXITKILL;
        ptrace(PTRACE_SETOPTIONS, child_, nullptr, kOptions);
        ptrace(PTRACE_SYSCALL, child_, nullptr, nullptr);
        return true;
    }

    // True: it was killed. False: it ended before, well.
    bool kill_at(int stop) {
        int status = 0;
        while (true) {
            const pid_t who = waitpid(-1, &status, __WALL);
            if (who < 0) return false;
            if (who == child_ && !WIFSTOPPED(status)) break;
            if (!WIFSTOPPED(status)) continue;  // one of its threads has ended
            // Each call stops its thread twice; a call's end is where the next one begins.
            const bool at_call = WSTOPSIG(status) == (SIGTRAP | 0x80);
            const bool begins = at_call && (inside_[who] = !inside_[who]);
            if (begins && !only_asks(who) && stop-- == 0) kill(child_, SIGKILL);
            ptrace(PTRACE_SYSCALL, who, nullptr, nullptr);
        }
        if (WIFSIGNALED(status)) return true;
        EXPECT_EQ(WEXITSTATUS(status), 0);
        return false;
    }

private:
    // Whether a file is there: hundreds of such calls change nothing.
    static bool only_asks(pid_t who) {
        __ptrace_syscall_info call{};
        return ptrace(PTRACE_GET_SYSCALL_INFO, who, sizeof call, &call) > 0 &&
               call.entry.nr == SYS_newfstatat;
    }

    pid_t child_ = -1;
    std::map<pid_t, bool> inside_;
};

TEST_P(Killed, AtEverySystemCall) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
    GTEST_SKIP() << "a sanitizer's own system calls would be the ones that are counted";
#endif
    const TemporaryDirectory directory(GetParam());
    directory.put("ferry.notes", kPrecious);
    std::map<bool, int> left;  // whether a header was there: how often
    int stop = 0;
    for (bool killed = true; killed && !HasFailure(); ++stop) {
        TracedChild child;
        if (!child.start(
                [&] { return write_and_read(directory.path(), Leftover::remove, kNever); }))
            GTEST_SKIP() << "processes may not be traced here";
        killed = child.kill_at(stop);
        ++left[directory.has("ferry.volume")];
        check_after_kill(directory, stop);
    }
    EXPECT_GT(stop, 100);
    EXPECT_GT(left[true], 50);
    EXPECT_GT(left[false], 5);
}

// Run 7 is the one before, on so many paths; run 8 has two, and other numbers of files.
struct Where {
    std::string path{};
    int paths_before = 2;
};
VolumeOptions durable(const Where& where, uint64_t run, Leftover leftover) {
    VolumeOptions made = options(where.path + "/0", leftover);
    made.paths[0].files = run == 7 ? 2 : 1;
    if (run == 8 || where.paths_before == 2)
        made.paths.push_back(
            {.path = where.path + "/1", .size_bytes = kMiB, .files = run == 7 ? 1 : 3});
    made.run_id = run;
    made.record_bytes = sizeof(SlotId);
    return made;
}

void transfer(Volume& volume, Executor& executor, Kind kind, SlotId slot, std::byte* buffer) {
    Operation operation{.kind = kind, .slot = slot, .buffer = {buffer, kSlotBytes}};
    volume.submit(operation);
    while (volume.poll() != &operation) executor.wait(kForever);
    if (operation.state != State::done) throw std::runtime_error("a transfer failed");
}

// A run of that number, in the place of whatever is there: a slot of such bytes, and its record.
int publish(const Where& path, uint64_t run) {
    auto executor = make_thread_executor();
    auto volume = Volume::open(durable(path, run, Leftover::remove_any), *executor);
    const AlignedBuffer memory = aligned_buffer(4096, kSlotBytes);
    memset(memory.get(), static_cast<int>(run), kSlotBytes);
    const SlotId slot = volume->allocate(0);
    transfer(*volume, *executor, Kind::write, slot, memory.get());
    memcpy(volume->record().data(), &slot, sizeof slot);
    volume->publish(sizeof slot);
    while (!volume->published()) {
        volume->poll();
        if (!volume->published()) executor->wait(kForever);
    }
    return 0;
}

// Whether that run's state is there, whole.
bool is_there(const Where& path, uint64_t run) try {
    auto executor = make_thread_executor();
    auto volume = Volume::open(durable(path, run, Leftover::resume), *executor);
    SlotId slot = kNoSlot;
    const auto record = volume->found_record(0);
    if (record.size() != sizeof slot) return false;
    memcpy(&slot, record.data(), sizeof slot);
    if (!volume->take(0, std::span(&slot, 1))) return false;
    const AlignedBuffer memory = aligned_buffer(4096, kSlotBytes);
    transfer(*volume, *executor, Kind::read, slot, memory.get());
    return std::all_of(memory.get(), memory.get() + kSlotBytes,
                       [&](std::byte byte) { return byte == static_cast<std::byte>(run); });
} catch (const Error&) {
    return false;
}

// An ended run's state goes when the next one's is there, and at no system call are both lost.
class KilledWhileItReplacesARun : public testing::TestWithParam<int> {};

TEST_P(KilledWhileItReplacesARun, OneOfBothIsWhole) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
    GTEST_SKIP() << "a sanitizer's own system calls would be the ones that are counted";
#endif
    setenv("FERRY_LOG", "error", 1);
    const TemporaryDirectory directory("/var/tmp");
    const Where where{directory.path(), GetParam()};
    for (const char* const name : {"0", "1"}) std::filesystem::create_directory(directory / name);
    const int kEach = is_quick() ? 3 : 1;
    std::map<uint64_t, int> found;
    bool old = false;
    int stop = 0;
    for (bool killed = true; killed; stop += kEach) {
        SCOPED_TRACE("killed at " + std::to_string(stop));
        const bool made = old || in_child([&] { return publish(where, 7); }) == 0;
        ASSERT_TRUE(made);
        TracedChild child;
        if (!child.start([&] { return publish(where, 8); }))
            GTEST_SKIP() << "processes may not be traced here";
        killed = child.kill_at(stop);
        old = is_there(where, 7);
        ++found[old ? 7 : 8];
        ASSERT_TRUE(old || is_there(where, 8));
    }
    EXPECT_GT(found[7], is_quick() ? 30 : 100);
    EXPECT_GT(found[8], is_quick() ? 2 : 10);
    RecordProperty("kills", stop);
    ASSERT_EQ(in_child([&] { return publish(where, 7); }), 0);
    for (const auto& file : std::filesystem::recursive_directory_iterator(directory.path()))
        EXPECT_NE(file.path().extension(), ".next") << file.path();
}

INSTANTIATE_TEST_SUITE_P(Paths, KilledWhileItReplacesARun, testing::Values(1, 2));

// Contents are undefined after a takeover, but the files are the same ones.
TEST_P(Killed, ReusedFilesAreTheSameFiles) {
    const TemporaryDirectory directory(GetParam());
    const int status =
        in_child([&] { return write_and_read(directory.path(), Leftover::remove, {3}); });
    ASSERT_TRUE(WIFSIGNALED(status));
    struct stat before {
    }, after{};
    ASSERT_EQ(stat((directory / "ferry.slots0").c_str(), &before), 0);
    auto executor = make_thread_executor();
    auto [bytes, volume, layout_bytes] =
        open_and_count(options(directory.path(), Leftover::reuse), *executor);
    ASSERT_EQ(stat((directory / "ferry.slots0").c_str(), &after), 0);
    EXPECT_EQ(before.st_ino, after.st_ino);
    EXPECT_EQ(layout_bytes, 0) << "the layout was written again";
    volume.reset();
    EXPECT_TRUE(directory.empty());
}

TEST_P(Killed, ALargerLayoutWritesTheRestOnly) {
    const TemporaryDirectory directory(GetParam());
    ASSERT_TRUE(WIFSIGNALED(
        in_child([&] { return write_and_read(directory.path(), Leftover::remove, {3}); })));
    auto executor = make_thread_executor();
    VolumeOptions larger = options(directory.path(), Leftover::reuse);
    larger.classes[0].slots = kSlots + 2;
    auto [bytes, volume, layout_bytes] = open_and_count(larger, *executor);
    EXPECT_EQ(layout_bytes, 2 * kSlotBytes);
    for (size_t i = 0; i < kSlots + 2; ++i) EXPECT_NE(volume->allocate(0), kNoSlot);
    volume.reset();
    EXPECT_TRUE(directory.empty());
}

INSTANTIATE_TEST_SUITE_P(On, Killed, testing::Values("/var/tmp", "/dev/shm"),
                         [](const auto& where) {
                             return std::string(where.param) == "/var/tmp" ? "disk" : "tmpfs";
                         });

}  // namespace
}  // namespace ferry::aio
