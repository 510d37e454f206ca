// Faults of the real kernel, in the middle of a run: no space, a limit, a file system that turns
// read-only or shuts down, a directory that is removed. Each ends as a named error, with every
// buffer given back, or does no harm at all.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <linux/fs.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/stat.h>

#include <cstring>
#include <filesystem>

#include "aio/backend.h"
#include "aio/buffer.h"
#include "ferry/aio.h"
#include "tests/support/child.h"
#include "tests/support/loop_device.h"
#include "tests/support/temporary_directory.h"

namespace ferry::aio {
namespace {

constexpr int64_t kSlotBytes = 64 * kKiB;
constexpr size_t kSlots = 8;

class RealFaults : public testing::TestWithParam<BackendKind> {
protected:
    void SetUp() override {
        if (GetParam() == BackendKind::uring && !why_no_uring().empty())
            GTEST_SKIP() << "no io_uring here: " << why_no_uring();
    }
    void open(const std::string& path, int files = 0) {
        volume_ = Volume::open({.paths = {{.path = path, .files = files}},
                                .classes = {{"a", kSlotBytes, kSlots}},
                                .backend = GetParam(),
                                .block_bytes = 16384,
                                .queue_depth = 8,
                                .operations_max = 16},
                               *executor_);
        slots_.clear();
        for (size_t i = 0; i < kSlots; ++i) slots_.push_back(volume_->allocate(0));
    }
    // Moves all of a slot; its errno. `value` is what is written, or what must be read.
    int move(Kind kind, SlotId slot, int value) {
        memset(memory_.get(), kind == Kind::write ? value : 0, kSlotBytes);
        operation_ = {.kind = kind, .slot = slot, .buffer = {memory_.get(), kSlotBytes}};
        volume_->submit(operation_);
        while (!volume_->poll()) executor_->wait(kForever);
        if (operation_.state != State::done) return operation_.error;
        for (int64_t i = 0; i < kSlotBytes; ++i)
            if (memory_.get()[i] != static_cast<std::byte>(value)) return -1;
        return 0;
    }
    // Writes all slots at once; how many failed, all with `error`. Each comes back exactly once.
    int write_all(int error) {
        const auto memory = aligned_buffer(4096, kSlotBytes);
        memset(memory.get(), 3, kSlotBytes);
        std::vector<Operation> operations(kSlots);
        for (size_t i = 0; i < kSlots; ++i) {
            operations[i] = {
                .kind = Kind::write, .slot = slots_[i], .buffer = {memory.get(), kSlotBytes}};
            volume_->submit(operations[i]);
        }
        size_t back = 0;
        int failed = 0;
        for (; back < kSlots; ++back) {
            Operation* operation = nullptr;
            while (!(operation = volume_->poll())) executor_->wait(kForever);
            if (operation->state == State::done) continue;
            EXPECT_EQ(operation->error, error) << strerror(operation->error);
            ++failed;
        }
        EXPECT_EQ(volume_->poll(), nullptr);
        EXPECT_EQ(volume_->in_flight(), 0);
        return failed;
    }
    void expect_named(const char* words) {
        const Error error = to_error(*volume_, operation_);
        EXPECT_EQ(error.exit_code(), 4);
        EXPECT_NE(std::string(error.what()).find(words), std::string::npos) << error.what();
        EXPECT_NE(error.problem().where.find(" at "), std::string::npos) << error.what();
        EXPECT_FALSE(error.problem().remedy.empty());
    }

    void end_at_the_limit(const std::string& path, rlim_t bytes) {
        const int status = in_child([&] {
            signal(SIGXFSZ, SIG_IGN);
            open(path, 1);
            const rlimit limit{.rlim_cur = bytes, .rlim_max = bytes};
            setrlimit(RLIMIT_FSIZE, &limit);
            EXPECT_EQ(move(Kind::write, slots_[0], 1), 0);
            for (const SlotId slot : slots_) {
                if (move(Kind::write, slot, 1) == 0) continue;
                EXPECT_EQ(operation_.error, EFBIG) << strerror(operation_.error);
                expect_named("File too large");
                const int code = to_error(*volume_, operation_).exit_code();
                volume_.reset();
                return HasFailure() ? 98 : code;
            }
            return 0;
        });
        ASSERT_TRUE(WIFEXITED(status));
        EXPECT_EQ(WEXITSTATUS(status), 4);
        EXPECT_TRUE(directory_.empty());
    }

    TemporaryDirectory directory_;
    std::unique_ptr<Executor> executor_ = make_thread_executor();
    std::unique_ptr<Volume> volume_;
    std::vector<SlotId> slots_;
    AlignedBuffer memory_ = aligned_buffer(4096, kSlotBytes);
    Operation operation_;
};

// Space is reserved at open, so only what was given back can be missing later.
TEST_P(RealFaults, NoSpaceInTheMiddleOfARun) {
    const Mounted small("none", directory_.path(), "tmpfs", "size=1m");
    if (!small.why_not().empty()) GTEST_SKIP() << small.why_not();
    open(directory_.path());
    for (const SlotId slot : slots_) ASSERT_EQ(move(Kind::write, slot, 1), 0);
    for (size_t i = 4; i < kSlots; ++i) volume_->free(slots_[i]);
    volume_->discard_free_slots();
    directory_.put("filler", std::string(kMiB, 'x'));
    for (size_t i = 4; i < kSlots; ++i) slots_[i] = volume_->allocate(0);
    EXPECT_EQ(write_all(ENOSPC), 4);
    ASSERT_EQ(move(Kind::write, slots_[4], 2), ENOSPC);
    expect_named("No space left on device");
    EXPECT_EQ(move(Kind::read, slots_[0], 3), 0) << "what was there is still there";
    std::filesystem::remove(directory_ / "filler");
    EXPECT_EQ(write_all(0), 0) << "the volume recovers with the space";
    volume_.reset();
    EXPECT_TRUE(directory_.empty());
}

// A limit within the second slot, at a block's end, inside one, and inside one on tmpfs, which
// writes what fits.
TEST_P(RealFaults, TheProcessEndsWithTheNamedError) {
    const TemporaryDirectory memory("/dev/shm");
    for (const auto& [path, bytes] : {std::pair{directory_.path(), rlim_t{98304}},
                                      std::pair{directory_.path(), rlim_t{98304 + 100}},
                                      std::pair{memory.path(), rlim_t{98304 + 100}}}) {
        SCOPED_TRACE(path + ", limit " + std::to_string(bytes));
        end_at_the_limit(path, bytes);
    }
    EXPECT_TRUE(memory.empty());
}

// A file system on a loop device, for faults that only a file system's own errors bring about.
class Ext4 {
public:
    explicit Ext4(const TemporaryDirectory& directory, const char* options = "errors=remount-ro")
        : device_(directory / "image", 16 * kMiB), mount_point_(directory / "mnt") {
        if (!device_.why_not().empty()) return;
        const std::string make = "mkfs.ext4 -q -F " + device_.name() + " > /dev/null 2>&1";
        if (system(make.c_str()) != 0) return;
        std::filesystem::create_directory(mount_point_);
        mounted_ = std::make_unique<Mounted>(device_.name(), mount_point_, "ext4", options);
    }
    std::string why_not() const {
        if (!device_.why_not().empty()) return device_.why_not();
        return mounted_ ? mounted_->why_not() : "no mkfs.ext4";
    }
    const std::string& path() const { return mount_point_; }
    const std::string& device() const { return device_.name(); }

private:
    LoopDevice device_;
    std::string mount_point_;
    std::unique_ptr<Mounted> mounted_;
};

TEST_P(RealFaults, TheFileSystemTurnsReadOnly) {
    const Ext4 ext4(directory_);
    if (!ext4.why_not().empty()) GTEST_SKIP() << ext4.why_not();
    open(ext4.path());
    ASSERT_EQ(move(Kind::write, slots_[1], 1), 0);
    volume_->flush();
    const std::string trigger =
        "/sys/fs/ext4/" + ext4.device().substr(strlen("/dev/")) + "/trigger_fs_error";
    std::ofstream(trigger) << "1" << std::flush;
    const int error = move(Kind::write, slots_[1], 2);
    if (error == 0) GTEST_SKIP() << "this kernel lets a broken file system be overwritten";
    EXPECT_EQ(error, EROFS) << strerror(error);
    expect_named("Read-only file system");
    EXPECT_EQ(write_all(EROFS), static_cast<int>(kSlots));
    EXPECT_EQ(move(Kind::read, slots_[1], 1), 0) << "reading still works";
    volume_.reset();  // says what it could not remove, and ends
    try {
        open(ext4.path());
        ADD_FAILURE() << "a read-only path was accepted";
    } catch (const Error& refused) {
        EXPECT_EQ(refused.trouble(), Trouble::usage) << refused.what();
    }
}

// A file system that takes O_DIRECT and then says that it does no such thing.
TEST_P(RealFaults, NoDirectIoIsSaidAndGotOver) {
    const Ext4 ext4(directory_, "data=journal");
    if (!ext4.why_not().empty()) GTEST_SKIP() << ext4.why_not();
    testing::internal::CaptureStderr();
    open(ext4.path(), 1);  // where data is journalled, probing for more takes long
    const std::string said = testing::internal::GetCapturedStderr();
    if (volume_->direct(0)) GTEST_SKIP() << "this kernel does not say";
    EXPECT_NE(said.find("buffered"), std::string::npos) << said;
    for (const SlotId slot : slots_) ASSERT_EQ(move(Kind::write, slot, 1), 0);
    volume_->flush();
    for (const SlotId slot : slots_) ASSERT_EQ(move(Kind::read, slot, 1), 0);
    open(directory_.path(), 1);
    EXPECT_TRUE(volume_->direct(0)) << "/var/tmp itself";
    volume_.reset();
}

// A frozen file system keeps a write for as long as it likes. Until it comes back the buffer is the
// volume's, and reads of other slots go on.
TEST_P(RealFaults, AStallOfSecondsIsWaitedFor) {
    const Ext4 ext4(directory_);
    if (!ext4.why_not().empty()) GTEST_SKIP() << ext4.why_not();
    open(ext4.path());
    for (const SlotId slot : {slots_[0], slots_[1]}) ASSERT_EQ(move(Kind::write, slot, 1), 0);
    const int root = ::open(ext4.path().c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (ioctl(root, FIFREEZE, 0) != 0) {
        close(root);
        GTEST_SKIP() << "no file system can be frozen here: " << strerror(errno);
    }
    const auto memory = aligned_buffer(4096, kSlotBytes);
    memset(memory.get(), 2, kSlotBytes);
    Operation stalled{.kind = Kind::write, .slot = slots_[0], .buffer = {memory.get(), kSlotBytes}};
    volume_->submit(stalled);
    const Nanos until = executor_->now() + 2'000'000'000;
    while (executor_->now() < until) executor_->wait(until);  // a wake-up of before may be left
    const bool back = volume_->poll() != nullptr;
    const int read = back ? 0 : move(Kind::read, slots_[1], 1);
    EXPECT_EQ(ioctl(root, FITHAW, 0), 0);
    close(root);
    if (back) GTEST_SKIP() << "this kernel lets a frozen file system be overwritten";
    EXPECT_EQ(read, 0);
    while (!volume_->poll()) executor_->wait(kForever);
    EXPECT_EQ(stalled.state, State::done);
    EXPECT_GT(stalled.finished_ns - stalled.submitted_ns, 1'900'000'000);
    EXPECT_EQ(move(Kind::read, slots_[0], 2), 0);
    volume_.reset();
}

TEST_P(RealFaults, TheDeviceIsShutDown) {
    const Ext4 ext4(directory_);
    if (!ext4.why_not().empty()) GTEST_SKIP() << ext4.why_not();
    open(ext4.path());
    ASSERT_EQ(move(Kind::write, slots_[1], 1), 0);
    const int root = ::open(ext4.path().c_str(), O_RDONLY | O_DIRECTORY);
    uint32_t how = 2;  // EXT4_GOING_FLAGS_NOLOGFLUSH
    const bool down = ioctl(root, _IOR('X', 125, uint32_t), &how) == 0;
    close(root);
    if (!down) GTEST_SKIP() << "this ext4 cannot be shut down";
    EXPECT_EQ(move(Kind::write, slots_[1], 2), EIO);
    expect_named("Input/output error");
    EXPECT_EQ(write_all(EIO), static_cast<int>(kSlots));
    EXPECT_THROW(volume_->flush(), Error);
    volume_.reset();
}

// The files live on until they are closed; the path's name is not needed before the next run.
TEST_P(RealFaults, TheDirectoryIsRemoved) {
    const std::string path = directory_ / "gone";
    std::filesystem::create_directory(path);
    open(path);
    std::filesystem::remove_all(path);
    for (const SlotId slot : slots_) ASSERT_EQ(move(Kind::write, slot, 5), 0);
    volume_->flush();
    for (const SlotId slot : slots_) ASSERT_EQ(move(Kind::read, slot, 5), 0);
    volume_.reset();
    EXPECT_TRUE(directory_.empty());
    try {
        open(path);
        ADD_FAILURE();
    } catch (const Error& error) {
        EXPECT_NE(std::string(error.what()).find("No such file"), std::string::npos);
    }
}

TEST_P(RealFaults, FreedSpaceGoesBackToTheFileSystem) {
    open(directory_.path());
    for (const SlotId slot : slots_) ASSERT_EQ(move(Kind::write, slot, 1), 0);
    const auto blocks = [&] {
        int64_t bytes = 0;
        struct stat status {};
        for (int i = 0;
             stat((directory_ / ("ferry.slots" + std::to_string(i))).c_str(), &status) == 0; ++i)
            bytes += int64_t{status.st_blocks} * 512;
        return bytes;
    };
    const int64_t before = blocks();
    for (size_t i = 2; i < kSlots; ++i) volume_->free(slots_[i]);
    volume_->discard_free_slots();
    EXPECT_EQ(before - blocks(), 6 * kSlotBytes);
    EXPECT_EQ(move(Kind::read, slots_[1], 1), 0);
}

INSTANTIATE_TEST_SUITE_P(On, RealFaults, testing::Values(BackendKind::uring, BackendKind::posix),
                         [](const auto& kind) {
                             return kind.param == BackendKind::uring ? "uring" : "posix";
                         });

}  // namespace
}  // namespace ferry::aio
