// Limits of a process: no io_uring, too few descriptors, locked memory, memory or threads. The
// volume goes on with a line in the log, or throws an Error; nothing aborts.
#include <errno.h>
#include <gtest/gtest.h>
#include <linux/audit.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstddef>
#include <cstring>
#include <filesystem>

#include "aio/backend.h"
#include "aio/buffer.h"
#include "ferry/aio.h"
#include "tests/support/child.h"
#include "tests/support/temporary_directory.h"

namespace ferry::aio {
namespace {

constexpr int64_t kSlotBytes = 64 * kKiB;

// As a container's filter does: the system call answers `error` from now on, in new threads too.
bool forbid(uint32_t system_call, uint32_t error) {
    sock_filter filter[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, system_call, 0, 1),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | error),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
    };
    const sock_fprog program{.len = std::size(filter), .filter = filter};
    return prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 &&
           syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, SECCOMP_FILTER_FLAG_TSYNC, &program) == 0;
}

void limit(__rlimit_resource what, rlim_t value) {
    const rlimit both{.rlim_cur = value, .rlim_max = value};
    setrlimit(what, &both);
}

class Limits : public testing::Test {
protected:
    VolumeOptions options(BackendKind kind = BackendKind::automatic) const {
        return {.paths = {{.path = directory_.path(), .files = 1}},
                .classes = {{"a", kSlotBytes, 4}},
                .backend = kind,
                .block_bytes = 16384,
                .queue_depth = 8,
                .operations_max = 16};
    }
    // The words of a child that opens, writes and reads under a limit: the backend's name and the
    // log, or the error's text.
    std::string outcome(VolumeOptions wanted, const auto& restrict) {
        const std::string name = directory_.path() + ".log";
        const int status = in_child([&] {
            setenv("FERRY_LOG", "info", 1);
            if (!freopen(name.c_str(), "w", stderr)) return 1;
            setvbuf(stderr, nullptr, _IONBF, 0);
            auto executor = make_thread_executor();
            restrict();
            try {
                auto volume = Volume::open(wanted, *executor);
                fprintf(stderr, "backend=%s\n", std::string(volume->backend_name()).c_str());
                return moves(*volume, *executor) ? 0 : 2;
            } catch (const Error& error) {
                fprintf(stderr, "error=%d %s\n", error.exit_code(), error.what());
                return 0;
            }
        });
        std::ifstream file(name);
        const std::string said{std::istreambuf_iterator<char>(file), {}};
        std::filesystem::remove(name);
        EXPECT_EQ(status, 0) << said;
        EXPECT_TRUE(directory_.empty()) << said;
        return said;
    }
    static bool moves(Volume& volume, Executor& executor) {
        const AlignedBuffer memory = aligned_buffer(4096, kSlotBytes);
        const SlotId slot = volume.allocate(0);
        for (const Kind kind : {Kind::write, Kind::read}) {
            memset(memory.get(), kind == Kind::write ? 9 : 0, kSlotBytes);
            Operation operation{.kind = kind, .slot = slot, .buffer = {memory.get(), kSlotBytes}};
            volume.submit(operation);
            while (!volume.poll()) executor.wait(kForever);
            if (operation.state != State::done) return false;
        }
        return memory.get()[kSlotBytes - 1] == std::byte{9};
    }
    static void expect(const std::string& said, const char* words) {
        EXPECT_NE(said.find(words), std::string::npos) << words << " is not in:\n" << said;
    }

    TemporaryDirectory directory_;
};

TEST_F(Limits, AContainerWithoutIoUring) {
    for (const uint32_t call : {SYS_io_uring_setup, SYS_io_uring_register, SYS_io_uring_enter}) {
        const auto filter = [call] { ASSERT_TRUE(forbid(call, EPERM)); };
        const std::string said = outcome(options(), filter);
        expect(said, "backend=posix");
        expect(said, "backend \"auto\": io_uring cannot be used (Operation not permitted)");
        const std::string refused = outcome(options(BackendKind::uring), filter);
        expect(refused, "error=4");
        expect(refused, "\"auto\" or \"posix\"");
    }
}

TEST_F(Limits, AFileSystemWithoutLocks) {
    const std::string said = outcome(options(), [] { ASSERT_TRUE(forbid(SYS_flock, ENOLCK)); });
    expect(said, "error=4");
    expect(said, "cannot be locked: No locks available");
    expect(said, "give another path");
}

// The names of the files could be lost with the power, and the record with them.
TEST_F(Limits, ARecordInADirectoryThatCannotBeFlushed) {
    for (const bool write_once : {true, false}) {
        VolumeOptions wanted = options(BackendKind::posix);
        wanted.record_bytes = 8;
        wanted.write_once = write_once;
        wanted.lays_out_later = true;
        const int status = in_child([&] {
            auto executor = make_thread_executor();
            auto volume = Volume::open(wanted, *executor);
            if (!forbid(SYS_fsync, EIO)) return 77;
            volume->publish(8);
            try {
                while (!volume->published()) {
                    static_cast<void>(volume->poll());
                    if (!volume->published()) executor->wait(kForever);
                }
            } catch (const Error& error) {
                const std::string words = error.what();
                EXPECT_NE(words.find("the directory cannot be flushed"), std::string::npos)
                    << words;
                volume.reset();
                return HasFailure() ? 1 : 0;
            }
            return 2;
        });
        if (WIFEXITED(status) && WEXITSTATUS(status) == 77)
            GTEST_SKIP() << "no seccomp filter here";
        EXPECT_EQ(status, 0);
        EXPECT_TRUE(directory_.empty());
    }
}

// A kernel that takes no transfers, for want of memory or of room for what is done: each is tried a
// bounded number of times, and ends with an error. Nothing waits for ever.
TEST_F(Limits, TheKernelTakesNoTransfers) {
    if (!why_no_uring().empty()) GTEST_SKIP() << "no io_uring here: " << why_no_uring();
    VolumeOptions wanted = options(BackendKind::uring);
    wanted.write_once = false;
    for (const uint32_t answer : {EAGAIN, EBUSY}) {
        const int status = in_child([&] {
            auto executor = make_thread_executor();
            auto volume = Volume::open(wanted, *executor);
            if (!forbid(SYS_io_uring_enter, answer)) return 77;
            const AlignedBuffer memory = aligned_buffer(4096, kSlotBytes);
            Operation operation{.kind = Kind::write,
                                .slot = volume->allocate(0),
                                .buffer = {memory.get(), kSlotBytes}};
            volume->submit(operation);
            while (!volume->poll()) executor->wait(kForever);
            EXPECT_EQ(operation.state, State::failed);
            EXPECT_EQ(operation.error, EAGAIN);
            EXPECT_EQ(operation.done_bytes, 0);
            const std::string words = to_error(*volume, operation).what();
            EXPECT_NE(words.find("kept asking to be retried"), std::string::npos) << words;
            EXPECT_THROW(volume->flush(), Error);
            EXPECT_GT(volume->counters()[0].retries, 16);
            EXPECT_LT(volume->counters()[0].retries, 1000);
            volume.reset();
            return HasFailure() ? 1 : 0;
        });
        if (WIFEXITED(status) && WEXITSTATUS(status) == 77)
            GTEST_SKIP() << "no seccomp filter here";
        EXPECT_EQ(status, 0) << strerror(static_cast<int>(answer));
        EXPECT_TRUE(directory_.empty());
    }
}

// The kernel refuses a registered buffer above 1 GiB. One page's worth of memory is mapped over and
// over, so that none of it is really needed.
TEST_F(Limits, MoreThanAGibibyteIsRegisteredInPieces) {
    if (!why_no_uring().empty()) GTEST_SKIP() << "no io_uring here: " << why_no_uring();
    constexpr size_t kPiece = 2 * kMiB, kAll = kGiB + 2 * kPiece;
    const int file = memfd_create("ferry-test", MFD_CLOEXEC);
    ASSERT_GE(file, 0);
    ASSERT_EQ(ftruncate(file, kPiece), 0);
    auto* const slab = static_cast<std::byte*>(
        mmap(nullptr, kAll, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
    ASSERT_NE(slab, MAP_FAILED);
    for (size_t at = 0; at < kAll; at += kPiece)
        ASSERT_NE(mmap(slab + at, kPiece, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, file, 0),
                  MAP_FAILED);
    VolumeOptions wanted = options(BackendKind::uring);
    wanted.registered = {{slab, kAll}};
    const std::string said = outcome(wanted, [] {});
    expect(said, "backend=uring");
    EXPECT_EQ(said.find("could be registered"), std::string::npos) << said;
    auto executor = make_thread_executor();
    const auto volume = Volume::open(wanted, *executor);
    const SlotId slot = volume->allocate(0);
    // In the second piece, and across the border between the two.
    for (const size_t at : {size_t{kGiB}, kGiB - static_cast<size_t>(kSlotBytes) / 2}) {
        const std::span<std::byte> buffer{slab + at, kSlotBytes};
        memset(buffer.data(), 5, buffer.size());
        Operation operation{.kind = Kind::write, .slot = slot, .buffer = buffer};
        for (const Kind kind : {Kind::write, Kind::read}) {
            operation.kind = kind;
            volume->submit(operation);
            while (!volume->poll()) executor->wait(kForever);
            EXPECT_EQ(operation.state, State::done);
            if (kind == Kind::write) memset(buffer.data(), 0, buffer.size());
        }
        EXPECT_EQ(buffer.front(), std::byte{5});
        EXPECT_EQ(buffer.back(), std::byte{5});
    }
    munmap(slab, kAll);
    close(file);
}

// The header and the slot file can be opened, a ring and its wake-up cannot.
TEST_F(Limits, NoDescriptorIsLeftForARing) {
    if (!why_no_uring().empty()) GTEST_SKIP() << "no io_uring here: " << why_no_uring();
    int rings = 0, posix = 0, refused = 0;
    for (rlim_t spare = 0; spare < 8; ++spare) {
        const std::string said = outcome(options(), [&] {
            const int next = dup(0);
            close(next);
            limit(RLIMIT_NOFILE, static_cast<rlim_t>(next) + spare);
        });
        if (said.find("error=") != std::string::npos) {
            ++refused;
            expect(said, "ulimit -n");
        } else if (said.find("backend=posix") != std::string::npos) {
            ++posix;
            expect(said, "backend \"auto\": io_uring cannot be used");
        } else {
            ++rings;
            expect(said, "backend=uring");
        }
    }
    EXPECT_GT(refused, 0);
    EXPECT_GT(posix, 0);
    EXPECT_GT(rings, 0);
}

TEST_F(Limits, NoMemoryMayBeLocked) {
    if (geteuid() != 0) GTEST_SKIP() << "only root can become a user without rights";
    if (!why_no_uring().empty()) GTEST_SKIP() << "no io_uring here: " << why_no_uring();
    const AlignedBuffer slab = aligned_buffer(4096, kMiB);
    VolumeOptions wanted = options();
    wanted.registered = {{slab.get(), kMiB}};
    std::filesystem::permissions(directory_.path(), std::filesystem::perms::all);
    const std::string said = outcome(wanted, [] {
        limit(RLIMIT_MEMLOCK, 512 * 1024);  // enough for a ring
        ASSERT_EQ(setresuid(65534, 65534, 65534), 0);
    });
    expect(said, "backend=uring");
    expect(said, "none of 1.00 MiB");
    expect(said, "ulimit -l");
}

TEST_F(Limits, SomeMemoryMayBeLocked) {
    if (geteuid() != 0) GTEST_SKIP() << "only root can become a user without rights";
    if (!why_no_uring().empty()) GTEST_SKIP() << "no io_uring here: " << why_no_uring();
    const AlignedBuffer slab = aligned_buffer(2 * kMiB, 16 * kMiB);
    VolumeOptions wanted = options();
    wanted.registered = {{slab.get(), 16 * kMiB}};
    std::filesystem::permissions(directory_.path(), std::filesystem::perms::all);
    const std::string said = outcome(wanted, [] {
        limit(RLIMIT_MEMLOCK, 5 * kMiB);
        ASSERT_EQ(setresuid(65534, 65534, 65534), 0);
    });
    expect(said, "backend=uring");
    expect(said, "4.00 MiB of 16.00 MiB");
    expect(said, "ulimit -l");
}

TEST_F(Limits, NoMemory) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
    GTEST_SKIP() << "a sanitizer needs all the addresses there are";
#endif
    const std::string said = outcome(options(BackendKind::posix), [] {
        FILE* status = fopen("/proc/self/statm", "r");
        unsigned long pages = 0;
        ASSERT_EQ(fscanf(status, "%lu", &pages), 1);
        fclose(status);
        limit(RLIMIT_AS, pages * 4096 + 1024 * 1024);
    });
    expect(said, "error=3");
    EXPECT_TRUE(said.find("memory") != std::string::npos ||
                said.find("thread") != std::string::npos)
        << said;
}

TEST_F(Limits, NoThreads) {
    if (geteuid() != 0) GTEST_SKIP() << "only root can become a user without rights";
    std::filesystem::permissions(directory_.path(), std::filesystem::perms::all);
    for (const rlim_t threads : {1, 4}) {
        const std::string said = outcome(options(BackendKind::posix), [&] {
            limit(RLIMIT_NPROC, threads);
            ASSERT_EQ(setresuid(65534, 65534, 65534), 0);
        });
        // A user that runs other things here may be at the limit already.
        if (said.find("backend=posix") == std::string::npos) {
            expect(said, "error=3");
            expect(said, "ulimit -u");
        }
    }
}

}  // namespace
}  // namespace ferry::aio
