// Refusals at open, and their words: bad paths, other people's files, no space.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <linux/magic.h>
#include <signal.h>
#include <sys/file.h>
#include <sys/mount.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/statfs.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <thread>

#include "ferry/aio.h"
#include "probe.h"
#include "tests/support/child.h"
#include "tests/support/layout_bytes.h"
#include "tests/support/temporary_directory.h"

namespace ferry::aio {
namespace {

namespace fs = std::filesystem;

class VolumeFiles : public testing::Test {
protected:
    VolumeOptions options() const {
        return {.paths = {{.path = path_, .size_bytes = kMiB}},
                .classes = {{"a", 65536, 4}},
                .queue_depth = 4,
                .operations_max = 16,
                .run_id = 0xabcdef};
    }
    std::unique_ptr<Volume> open(const VolumeOptions& wanted) {
        return Volume::open(wanted, *executor_);
    }
    void expect_refused(const VolumeOptions& wanted, Trouble trouble, const std::string& word) {
        try {
            open(wanted);
            ADD_FAILURE() << "was not refused: " << word;
        } catch (const Error& error) {
            EXPECT_EQ(error.trouble(), trouble) << error.what();
            EXPECT_NE(std::string(error.what()).find(word), std::string::npos) << error.what();
            EXPECT_FALSE(error.problem().where.empty()) << error.what();
            EXPECT_FALSE(error.problem().remedy.empty()) << error.what();
        }
    }
    void put(const char* name, std::string_view contents) const {
        std::ofstream(path_ + "/" + name) << contents;
    }
    // The header of a run that was killed.
    std::string leftover_header() { return leftover_header(options()); }
    std::string leftover_header(const VolumeOptions& wanted) {
        const pid_t child = fork();
        if (child == 0) {
            auto executor = make_thread_executor();
            auto volume = Volume::open(wanted, *executor);
            kill(getpid(), SIGKILL);
        }
        int status = 0;
        waitpid(child, &status, 0);
        EXPECT_TRUE(WIFSIGNALED(status));
        std::ifstream file(path_ + "/ferry.volume");
        return {std::istreambuf_iterator<char>(file), {}};
    }
    bool exists(const char* name) const { return fs::exists(path_ + "/" + name); }

    const TemporaryDirectory directory_;
    const std::string& path_ = directory_.path();
    std::unique_ptr<Executor> executor_ = make_thread_executor();
};

TEST_F(VolumeFiles, MissingPath) {
    VolumeOptions wanted = options();
    wanted.paths[0].path = path_ + "/nowhere";
    expect_refused(wanted, Trouble::usage, "No such file");
}

TEST_F(VolumeFiles, AFileInsteadOfADirectory) {
    put("file", "x");
    VolumeOptions wanted = options();
    wanted.paths[0].path = path_ + "/file";
    expect_refused(wanted, Trouble::usage, "not a directory");
    wanted.paths[0].raw_device = true;
    expect_refused(wanted, Trouble::usage, "no block device");
}

TEST_F(VolumeFiles, TooSmallByTheMissingBytes) {
    VolumeOptions wanted = options();
    wanted.paths[0].size_bytes = 3 * 65536 + kHeaderBytes;
    expect_refused(wanted, Trouble::does_not_fit, "65536 bytes (64.00 KiB) are missing");
    EXPECT_TRUE(fs::is_empty(path_));
}

TEST_F(VolumeFiles, LessFreeSpaceThanAskedFor) {
    VolumeOptions wanted = options();
    wanted.paths[0].size_bytes = int64_t{1} << 50;
    expect_refused(wanted, Trouble::does_not_fit, "too little free space");
    EXPECT_TRUE(fs::is_empty(path_));
}

TEST_F(VolumeFiles, FileSizeLimit) {
    const pid_t child = fork();
    if (child == 0) {
        const rlimit limit{.rlim_cur = 100'000, .rlim_max = 100'000};
        setrlimit(RLIMIT_FSIZE, &limit);
        auto executor = make_thread_executor();
        try {
            Volume::open(options(), *executor);
        } catch (const Error& error) {
            _exit(error.trouble() == Trouble::does_not_fit &&
                          std::string(error.what()).find("RLIMIT_FSIZE") != std::string::npos
                      ? 42
                      : 1);
        }
        _exit(0);
    }
    int status = 0;
    waitpid(child, &status, 0);
    EXPECT_TRUE(WIFEXITED(status)) << "killed by SIGXFSZ?";
    EXPECT_EQ(WEXITSTATUS(status), 42);
    EXPECT_TRUE(fs::is_empty(path_));
}

// A file system that is full although statvfs promised room cannot be provoked; one that is small
// can, where the test may mount.
TEST_F(VolumeFiles, SmallTmpfs) {
    if (mount("none", path_.c_str(), "tmpfs", 0, "size=512k") != 0) GTEST_SKIP() << "cannot mount";
    VolumeOptions wanted = options();
    wanted.paths[0].size_bytes = 0;
    wanted.classes[0].slots = 6;
    for (int i = 0; i < 20; ++i)  // each takes more than half: the last one's space must be back
        EXPECT_EQ(open(wanted)->alignment(), 4096);
    wanted.classes[0].slots = 9;
    expect_refused(wanted, Trouble::does_not_fit, "missing");
    EXPECT_TRUE(fs::is_empty(path_));
    // The rings of the volumes above let go of their files a little later.
    int failed = 1;
    for (int i = 0; i < 1000 && failed; ++i, usleep(1000))
        failed = mount("none", path_.c_str(), nullptr, MS_REMOUNT | MS_RDONLY, nullptr);
    if (!failed) expect_refused(options(), Trouble::usage, "not writable");
    EXPECT_EQ(umount2(path_.c_str(), MNT_DETACH), 0);
    EXPECT_EQ(failed, 0);
}

TEST_F(VolumeFiles, FilesArePrivate) {
    const auto volume = open(options());
    for (const char* name : {"ferry.volume", "ferry.slots0"}) {
        struct stat status {};
        ASSERT_EQ(stat((path_ + "/" + name).c_str(), &status), 0);
        EXPECT_EQ(status.st_mode & 0777, 0600u) << name;
    }
}

TEST_F(VolumeFiles, LockedByAnother) {
    const auto first = open(options());
    expect_refused(options(), Trouble::usage, "process " + std::to_string(getpid()));
    EXPECT_TRUE(exists("ferry.slots0")) << "the refused one removed the owner's files";
}

TEST_F(VolumeFiles, ALeftoverIsRefusedOrRemovedAsAsked) {
    ASSERT_GE(leftover_header().size(), 32u);
    ASSERT_TRUE(exists("ferry.slots0"));
    VolumeOptions wanted = options();
    wanted.leftover = Leftover::refuse;
    expect_refused(wanted, Trouble::usage, "killed run");
    EXPECT_TRUE(exists("ferry.slots0"));
    wanted.leftover = Leftover::remove;
    open(wanted).reset();
    EXPECT_TRUE(fs::is_empty(path_));
}

TEST_F(VolumeFiles, ALeftoverOfAnotherRunIsTakenOnlyWhenThatIsSaid) {
    leftover_header();
    VolumeOptions wanted = options();
    wanted.run_id = 5;
    for (const Leftover leftover : {Leftover::refuse, Leftover::remove, Leftover::reuse}) {
        wanted.leftover = leftover;
        expect_refused(wanted, Trouble::usage, "another run");
        expect_refused(wanted, Trouble::usage,
                       "set io.leftovers (VolumeOptions::leftover) to \"remove_any\"");
        EXPECT_TRUE(exists("ferry.slots0"));
    }
    wanted.leftover = Leftover::reuse_any;
    EXPECT_EQ(open_and_count(wanted, *executor_).layout_bytes, 0);
    leftover_header();
    wanted.leftover = Leftover::remove_any;
    EXPECT_EQ(open_and_count(wanted, *executor_).layout_bytes, 4 * 65536);
}

TEST_F(VolumeFiles, MoreSlotFilesLeftThanWantedNowAllGo) {
    VolumeOptions many = options();
    many.paths[0].files = 4;
    const pid_t child = fork();
    if (child == 0) {
        auto executor = make_thread_executor();
        auto volume = Volume::open(many, *executor);
        kill(getpid(), SIGKILL);
    }
    waitpid(child, nullptr, 0);
    ASSERT_TRUE(exists("ferry.slots3"));
    open(options()).reset();
    EXPECT_TRUE(fs::is_empty(path_));
}

TEST_F(VolumeFiles, TruncatedHeader) {
    const std::string header = leftover_header();
    put("ferry.volume", header.substr(0, 12));
    VolumeOptions wanted = options();
    expect_refused(wanted, Trouble::io, "truncated");
    EXPECT_TRUE(exists("ferry.slots0")) << "nobody knows whose it is";
    wanted.leftover = Leftover::remove_any;
    open(wanted).reset();
    EXPECT_TRUE(fs::is_empty(path_));
}

constexpr size_t kCopyBytes = kHeaderBytes / 2;

// One bit of one copy is nobody's loss, wherever it lies.
TEST_F(VolumeFiles, OneDamagedHeaderOfTwo) {
    const std::string header = leftover_header();
    ASSERT_EQ(header.size(), 2 * kCopyBytes);
    ASSERT_EQ(header.substr(0, kCopyBytes), header.substr(kCopyBytes));
    VolumeOptions wanted = options();
    wanted.leftover = Leftover::refuse;
    for (size_t bit = 0; bit < 8 * header.size(); bit += bit % (8 * kCopyBytes) < 1024 ? 1 : 61) {
        SCOPED_TRACE("bit " + std::to_string(bit));
        std::string damaged = header;
        damaged[bit / 8] = static_cast<char>(damaged[bit / 8] ^ (1 << bit % 8));
        put("ferry.volume", damaged);
        expect_refused(wanted, Trouble::usage, "files of a killed run are left here");
    }
    put("ferry.volume", header.substr(0, kCopyBytes));  // killed between the two
    expect_refused(wanted, Trouble::usage, "files of a killed run are left here");
    put("ferry.volume", std::string(kCopyBytes, 'x') + header.substr(kCopyBytes));
    wanted.leftover = Leftover::remove;
    open(wanted).reset();
    EXPECT_TRUE(fs::is_empty(path_));
}

// Whatever bit of both is wrong, what they say of others' state is not acted upon.
TEST_F(VolumeFiles, DamagedHeader) {
    const std::string header = leftover_header();
    VolumeOptions wanted = options();
    for (size_t bit = 0; bit < 8 * kCopyBytes; bit += bit < 1024 ? 1 : 61) {
        SCOPED_TRACE("bit " + std::to_string(bit));
        std::string damaged = header;
        for (const size_t at : {bit / 8, kCopyBytes + bit / 8})
            damaged[at] = static_cast<char>(damaged[at] ^ (1 << bit % 8));
        put("ferry.volume", damaged);
        for (const Leftover leftover : {Leftover::refuse, Leftover::remove, Leftover::reuse}) {
            wanted.leftover = leftover;
            expect_refused(wanted, Trouble::io, "a damaged header is left here");
        }
        ASSERT_TRUE(exists("ferry.slots0"));
    }
    put("ferry.volume", header);
    for (const Leftover leftover : {Leftover::remove_any, Leftover::reuse_any}) {
        std::string damaged = leftover_header();
        damaged[24] ^= 1;  // how many files there are
        damaged[kCopyBytes + 24] ^= 1;
        put("ferry.volume", damaged);
        wanted.leftover = leftover;
        EXPECT_EQ(open_and_count(wanted, *executor_).layout_bytes, 4 * 65536)
            << "a layout that nobody knows is not taken over";
        EXPECT_TRUE(fs::is_empty(path_));
    }
}

TEST_F(VolumeFiles, AnEmptyHeaderIsAKillBeforeItsFirstWrite) {
    put("ferry.volume", "");
    open(options()).reset();
    EXPECT_TRUE(fs::is_empty(path_));
}

TEST_F(VolumeFiles, ForeignFilesAreNeverTouched) {
    put("ferry.volume", "somebody's diary, which is longer than a header's magic");
    expect_refused(options(), Trouble::usage, "not ferry's");
    EXPECT_TRUE(exists("ferry.volume"));
    fs::remove(path_ + "/ferry.volume");
    put("ferry.slots0", "somebody's film");
    expect_refused(options(), Trouble::usage, "not ferry's");
    EXPECT_EQ(fs::file_size(path_ + "/ferry.slots0"), 15u);
    EXPECT_FALSE(exists("ferry.volume")) << "a refused attempt left a header";
}

TEST_F(VolumeFiles, WhatIsNoFileIsNotFerrysEither) {
    const std::string name = path_ + "/ferry.volume";
    ASSERT_EQ(mkdir(name.c_str(), 0700), 0);
    expect_refused(options(), Trouble::usage, "not ferry's");
    ASSERT_EQ(rmdir(name.c_str()), 0);
    ASSERT_EQ(mkfifo(name.c_str(), 0600), 0);
    expect_refused(options(), Trouble::usage, "not ferry's");
    EXPECT_TRUE(fs::is_fifo(name));
}

// A killed process is one for a while.
TEST_F(VolumeFiles, ALockThatIsAboutToBeGivenUpIsWaitedFor) {
    put("ferry.volume", "");
    const int held = ::open((path_ + "/ferry.volume").c_str(), O_RDWR | O_CLOEXEC);
    ASSERT_EQ(flock(held, LOCK_EX), 0);
    std::thread ending([held] {
        std::this_thread::sleep_for(std::chrono::milliseconds(50));
        close(held);
    });
    EXPECT_NO_THROW(open(options()));
    ending.join();
    EXPECT_TRUE(fs::is_empty(path_));
}

TEST_F(VolumeFiles, NewerFormat) {
    std::string header = leftover_header();
    for (const size_t copy : {size_t{0}, kCopyBytes}) {
        header[copy + 8] = 99;
        header[copy + 32] ^= 1;  // such a format's checksum is not this one's
    }
    put("ferry.volume", header);
    expect_refused(options(), Trouble::usage, "newer ferry");
    EXPECT_TRUE(exists("ferry.slots0"));
}

TEST_F(VolumeFiles, OlderFormat) {
    std::string header = leftover_header().substr(0, kCopyBytes);  // there was one of them
    header[8] = 4;
    header[32] ^= 1;
    put("ferry.volume", header);
    VolumeOptions wanted = options();
    expect_refused(wanted, Trouble::usage, "stale files of an older ferry");
    wanted.leftover = Leftover::reuse_any;
    EXPECT_GT(open_and_count(wanted, *executor_).layout_bytes, 0)
        << "an older layout is not taken over";
    EXPECT_TRUE(fs::is_empty(path_));
}

// Killed in the middle of its layout: parts of the files were never written.
TEST_F(VolumeFiles, AnUnfinishedLayoutIsNotTakenOver) {
    VolumeOptions wanted = options();
    wanted.lays_out_later = true;
    leftover_header(wanted);
    wanted = options();
    wanted.leftover = Leftover::reuse;
    EXPECT_EQ(open_and_count(wanted, *executor_).layout_bytes, 4 * 65536);
}

TEST_F(VolumeFiles, ACutOrHoledSlotFileIsWrittenAgain) {
    const auto written_again = [&](auto damage) {
        leftover_header();
        damage(path_ + "/ferry.slots0");
        VolumeOptions wanted = options();
        wanted.leftover = Leftover::reuse;
        return open_and_count(wanted, *executor_).layout_bytes;
    };
    EXPECT_EQ(written_again([](const std::string&) {}), 0);
    EXPECT_EQ(written_again([](const std::string& name) { fs::resize_file(name, 65536); }),
              3 * 65536);
    EXPECT_EQ(written_again([](const std::string& name) { fs::remove(name); }), 4 * 65536);
    EXPECT_EQ(written_again([](const std::string& name) {
                  const int file = ::open(name.c_str(), O_RDWR);
                  EXPECT_EQ(fallocate(file, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 8192, 8192),
                            0);
                  close(file);
              }),
              4 * 65536);
    EXPECT_TRUE(fs::is_empty(path_));
}

TEST_F(VolumeFiles, ALinkInPlaceOfASlotFileIsNotFollowed) {
    leftover_header();
    put("precious", "do not overwrite");
    fs::remove(path_ + "/ferry.slots0");
    fs::create_symlink(path_ + "/precious", path_ + "/ferry.slots0");
    VolumeOptions wanted = options();
    for (const Leftover leftover : {Leftover::reuse, Leftover::remove}) {
        wanted.leftover = leftover;
        EXPECT_THROW(open(wanted), Error);
        EXPECT_EQ(fs::file_size(path_ + "/precious"), 16u);
    }
}

TEST_F(VolumeFiles, WhatIsPutInASlotFilesPlaceStays) {
    auto volume = open(options());
    fs::rename(path_ + "/ferry.slots0", path_ + "/away");
    put("ferry.slots0", "results");
    volume.reset();
    EXPECT_EQ(fs::file_size(path_ + "/ferry.slots0"), 7u);
    EXPECT_FALSE(exists("ferry.volume"));
}

TEST_F(VolumeFiles, ASymbolicLinkIsNotFollowed) {
    put("precious", "do not overwrite");
    fs::create_symlink(path_ + "/precious", path_ + "/ferry.volume");
    expect_refused(options(), Trouble::io, "a symbolic link is in its place");
    EXPECT_EQ(fs::file_size(path_ + "/precious"), 16u);
}

TEST_F(VolumeFiles, OnePathGivenTwice) {
    VolumeOptions wanted = options();
    wanted.paths.push_back({.path = path_ + "/../" + fs::path(path_).filename().string()});
    expect_refused(wanted, Trouble::usage, "given twice");
    EXPECT_TRUE(fs::is_empty(path_));
}

TEST_F(VolumeFiles, TheKernelsOwnFileSystems) {
    VolumeOptions wanted = options();
    wanted.paths[0].size_bytes = 0;
    for (const char* path : {"/proc", "/sys"}) {
        wanted.paths[0].path = path;
        expect_refused(wanted, Trouble::usage, path);
        try {
            open(wanted);
        } catch (const Error& error) {
            EXPECT_EQ(std::string(error.what()).find("dmesg"), std::string::npos) << error.what();
        }
    }
}

TEST_F(VolumeFiles, LeftoversOfAnotherUser) {
    if (geteuid() != 0) GTEST_SKIP() << "only root can be two users";
    leftover_header();
    fs::permissions(path_, fs::perms::all);
    const int status = in_child([&] {
        if (setresuid(65534, 65534, 65534) != 0) return 1;
        expect_refused(options(), Trouble::usage, "the volume of another user (uid 0)");
        return HasFailure() ? 2 : 0;
    });
    EXPECT_EQ(status, 0);
    EXPECT_TRUE(exists("ferry.volume"));
}

// As many files as the probe found to pay, once for all volumes on a file system.
TEST_F(VolumeFiles, SlotFilesFollowTheProbe) {
    VolumeOptions wanted = options();
    wanted.paths[0].size_bytes = 16 * kMiB;
    const TemporaryDirectory memory("/dev/shm");
    for (const std::string& path : {memory.path(), path_}) {
        wanted.paths[0].path = path;
        const auto first = open(wanted);
        const auto files =
            std::distance(fs::directory_iterator(path), fs::directory_iterator()) - 1;
        const int file = ::open((path + "/ferry.slots0").c_str(), O_RDONLY);
        const Findings& known = findings_of(file, first->direct(0));
        close(file);
        ASSERT_TRUE(known.only_copies && known.writers_take_turns);
        EXPECT_EQ(files, *known.writers_take_turns ? 8 : 1) << path;
    }
}

TEST_F(VolumeFiles, TheSecondVolumeProbesNothing) {
    const VolumeOptions wanted = options();
    open(wanted).reset();
    EXPECT_EQ(open(wanted)->counters()[0].bytes_overhead, 4 * 65536 + 2 * kHeaderBytes)
        << "the layout, and the header twice";
}

// The volume counts all bytes that the kernel says this process sent to devices, and hardly more.
TEST_F(VolumeFiles, EveryByteWrittenIsCounted) {
    struct statfs system {};
    ASSERT_EQ(statfs(path_.c_str(), &system), 0);
    if (system.f_type == TMPFS_MAGIC) GTEST_SKIP() << "/var/tmp is no disk here";
    const auto sent = [] {
        std::ifstream file("/proc/self/io");
        std::string word;
        while (file >> word && word != "write_bytes:") {
        }
        int64_t bytes = -1;
        file >> bytes;
        return bytes;
    };
    // In a child: what other tests found out is not known there, nor counted.
    const int status = in_child([&] {
        VolumeOptions wanted = options();
        wanted.paths[0].size_bytes = 64 * kMiB;
        wanted.classes[0] = {"a", kMiB, 8};
        forget_findings();
        const int64_t before = sent();
        const auto volume = open(wanted);
        const int64_t bytes = sent() - before;
        const int64_t counted = volume->counters()[0].bytes_overhead;
        printf("%ld bytes sent, %ld counted\n", static_cast<long>(bytes),
               static_cast<long>(counted));
        EXPECT_GE(counted, 8 * kMiB);
        EXPECT_LE(counted, 64 * kMiB) << "probing is cheap";
        EXPECT_NEAR(static_cast<double>(bytes), static_cast<double>(counted), kMiB)
            << "but for metadata of the file system";
        return HasFailure() ? 1 : 0;
    });
    EXPECT_EQ(status, 0);
}

TEST_F(VolumeFiles, NonsenseOptions) {
    const auto refused = [&](auto change, const char* word) {
        VolumeOptions wanted = options();
        change(wanted);
        try {
            open(wanted);
            ADD_FAILURE() << word;
        } catch (const Error& error) {
            EXPECT_EQ(error.trouble(), Trouble::usage);
            EXPECT_NE(std::string(error.what()).find(word), std::string::npos) << error.what();
            EXPECT_FALSE(error.problem().measured.empty()) << error.what();
            EXPECT_FALSE(error.problem().limit.empty()) << error.what();
            EXPECT_FALSE(error.problem().remedy.empty()) << error.what();
        }
    };
    refused([](VolumeOptions& o) { o.slack = 2; }, "slack");
    refused([](VolumeOptions& o) { o.paths.clear(); }, "no storage path");
    refused([](VolumeOptions& o) { o.classes.clear(); }, "classes");
    refused([](VolumeOptions& o) { o.queue_depth = 0; }, "queue_depth");
    refused([](VolumeOptions& o) { o.block_bytes = 5000; }, "block_bytes");
    refused([](VolumeOptions& o) { o.block_bytes = 4 * kGiB; }, "block_bytes");
    refused([](VolumeOptions& o) { o.classes[0].slot_bytes = -1; }, "slot_bytes");
    EXPECT_TRUE(fs::is_empty(path_));
}

TEST_F(VolumeFiles, FailedOperationsAreNamed) {
    const auto volume = open(options());
    const SlotId slot = volume->allocate(0);
    Operation operation{.kind = Kind::write,
                        .slot = slot,
                        .offset = 4096,
                        .buffer = {static_cast<std::byte*>(nullptr) + 4096, 4096}};
    operation.state = State::failed;
    operation.error = ENOSPC;
    const Error error = to_error(*volume, operation);
    EXPECT_EQ(error.trouble(), Trouble::io);
    EXPECT_NE(std::string(error.what()).find("No space left"), std::string::npos);
    EXPECT_NE(error.problem().where.find(path_ + "/ferry.slots0"), std::string::npos);
    EXPECT_FALSE(error.problem().remedy.empty());
    operation.state = State::cancelled;
    EXPECT_NE(to_error(*volume, operation).problem().remedy.find("again"), std::string::npos);
}

// The slot file loses its end behind our back: reads find no bytes there, and end.
TEST_F(VolumeFiles, AFileCutShortIsAnError) {
    const auto volume = open(options());
    ASSERT_EQ(truncate((path_ + "/ferry.slots0").c_str(), 8192), 0);
    auto* memory = static_cast<std::byte*>(std::aligned_alloc(4096, 65536));
    Operation read{.kind = Kind::read, .slot = volume->allocate(0), .buffer = {memory, 65536}};
    volume->submit(read);
    while (!volume->poll()) executor_->wait(kForever);
    EXPECT_EQ(read.state, State::failed);
    EXPECT_EQ(read.error, EIO);
    std::free(memory);
}

TEST_F(VolumeFiles, SealFindsEveryChange) {
    std::vector<std::byte> bytes(static_cast<size_t>(2 * kPieceBytes + 100));
    for (size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<std::byte>(i * 7 / 3);
    std::vector<uint64_t> sums(static_cast<size_t>(pieces_of(static_cast<int64_t>(bytes.size()))));
    ASSERT_EQ(sums.size(), 3u);
    seal(bytes, 5, sums);
    EXPECT_EQ(verify(bytes, 5, sums), -1);
    EXPECT_EQ(verify(bytes, 4, sums), 0) << "the same bytes of another version";
    bytes.back() ^= std::byte{1};
    EXPECT_EQ(verify(bytes, 5, sums), 2);
    bytes[static_cast<size_t>(kPieceBytes)] ^= std::byte{128};
    EXPECT_EQ(verify(bytes, 5, sums), 1);
}

}  // namespace
}  // namespace ferry::aio
