// Raw block devices, as loop devices: used only when confirmed, recognised after a kill, and given
// back what was freed.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/stat.h>

#include <cstring>

#include "aio/buffer.h"
#include "ferry/aio.h"
#include "tests/support/child.h"
#include "tests/support/layout_bytes.h"
#include "tests/support/loop_device.h"
#include "tests/support/temporary_directory.h"

namespace ferry::aio {
namespace {

constexpr int64_t kSlotBytes = 64 * kKiB;
constexpr size_t kSlots = 16;

class RawDevice : public testing::Test {
protected:
    void SetUp() override {
        if (!device_.why_not().empty()) GTEST_SKIP() << device_.why_not();
    }
    VolumeOptions options() const {
        return {.paths = {{.path = device_.name(), .raw_device = true}},
                .classes = {{"a", kSlotBytes, kSlots}},
                .queue_depth = 8,
                .operations_max = 16,
                .run_id = 3};
    }
    std::unique_ptr<Volume> open(const VolumeOptions& wanted) {
        return Volume::open(wanted, *executor_);
    }
    std::string refusal(const VolumeOptions& wanted, Trouble trouble = Trouble::usage) {
        try {
            open(wanted);
        } catch (const Error& error) {
            EXPECT_EQ(error.trouble(), trouble) << error.what();
            return error.what();
        }
        return "accepted";
    }
    void leave_a_killed_run() {
        EXPECT_TRUE(WIFSIGNALED(in_child([&] {
            auto executor = make_thread_executor();
            auto volume = Volume::open(options(), *executor);
            return kill(getpid(), SIGKILL);
        })));
    }
    int64_t backing_bytes() const {
        struct stat status {};
        stat((directory_ / "image").c_str(), &status);
        return int64_t{status.st_blocks} * 512;
    }
    void flip(int64_t at) const {
        char byte = 0;
        const int file = ::open(device_.name().c_str(), O_RDWR | O_SYNC);
        EXPECT_EQ(pread(file, &byte, 1, at), 1);
        byte = static_cast<char>(byte ^ 1);
        EXPECT_EQ(pwrite(file, &byte, 1, at), 1);
        close(file);
    }
    std::string first_bytes() const {
        char bytes[8] = {};
        const int file = ::open(device_.name().c_str(), O_RDONLY);
        EXPECT_EQ(pread(file, bytes, sizeof bytes, 0), static_cast<ssize_t>(sizeof bytes));
        close(file);
        return {bytes, sizeof bytes};
    }

    TemporaryDirectory directory_;
    LoopDevice device_{directory_ / "image", 16 * kMiB};
    std::unique_ptr<Executor> executor_ = make_thread_executor();
};

TEST_F(RawDevice, NeedsToBeConfirmed) {
    VolumeOptions wanted = options();
    wanted.paths[0].raw_device = false;
    EXPECT_NE(refusal(wanted).find("set raw_device"), std::string::npos);
}

TEST_F(RawDevice, AMountedOneIsRefused) {
    const std::string make = "mkfs.ext4 -q -F " + device_.name() + " > /dev/null 2>&1";
    if (system(make.c_str()) != 0) GTEST_SKIP() << "no mkfs.ext4";
    const TemporaryDirectory where;
    const Mounted mounted(device_.name(), where.path(), "ext4", "");
    if (!mounted.why_not().empty()) GTEST_SKIP() << mounted.why_not();
    EXPECT_NE(refusal(options()).find("mounted or in use"), std::string::npos);
}

TEST_F(RawDevice, GivenTwiceUnderTwoNames) {
    const std::string alias = directory_ / "alias";
    ASSERT_EQ(symlink(device_.name().c_str(), alias.c_str()), 0);
    VolumeOptions wanted = options();
    wanted.paths.push_back({.path = alias, .raw_device = true});
    EXPECT_NE(refusal(wanted).find("given twice"), std::string::npos);
}

TEST_F(RawDevice, UsedByAnother) {
    const auto volume = open(options());
    EXPECT_NE(refusal(options()).find("in use by another ferry"), std::string::npos);
}

TEST_F(RawDevice, LeftoversAreRefusedRemovedOrReused) {
    leave_a_killed_run();
    EXPECT_EQ(first_bytes(), "ferryvol");
    VolumeOptions wanted = options();
    wanted.leftover = Leftover::refuse;
    EXPECT_NE(refusal(wanted).find("killed run"), std::string::npos);
    wanted.run_id = 4;
    for (const Leftover own : {Leftover::refuse, Leftover::remove, Leftover::reuse}) {
        wanted.leftover = own;
        EXPECT_NE(refusal(wanted).find("another run"), std::string::npos);
        EXPECT_EQ(first_bytes(), "ferryvol");
    }
    wanted.leftover = Leftover::reuse_any;
    EXPECT_EQ(open_and_count(wanted, *executor_).layout_bytes, 0);
    EXPECT_EQ(first_bytes(), std::string(8, '\0')) << "a closed volume leaves no header";
    leave_a_killed_run();
    wanted = options();
    wanted.leftover = Leftover::remove;
    EXPECT_EQ(open_and_count(wanted, *executor_).layout_bytes,
              static_cast<int64_t>(kSlots) * kSlotBytes);
}

// Not even a wrong magic makes it a device whose contents may be destroyed.
TEST_F(RawDevice, ADamagedHeaderIsStillFerrys) {
    leave_a_killed_run();
    // In both copies of the header: one of them alone would count.
    const auto flip_both = [this](int64_t at) {
        flip(at);
        flip(at + 4096);
    };
    for (const int64_t at : {0, 8, 28, 32, 48, 4000}) {
        flip_both(at);
        for (const Leftover leftover : {Leftover::remove, Leftover::reuse, Leftover::resume}) {
            VolumeOptions wanted = options();
            wanted.leftover = leftover;
            const std::string why = refusal(wanted, Trouble::io);
            EXPECT_NE(why.find("damaged"), std::string::npos) << "byte " << at << ": " << why;
        }
        flip_both(at);
    }
    EXPECT_EQ(refusal(options()), "accepted");
}

TEST_F(RawDevice, FreedSlotsAreDiscarded) {
    const auto volume = open(options());
    std::vector<SlotId> slots;
    for (size_t i = 0; i < kSlots; ++i) slots.push_back(volume->allocate(0));
    volume->flush();
    const int64_t before = backing_bytes();
    for (size_t i = 4; i < kSlots; ++i) volume->free(slots[i]);
    volume->discard_free_slots();
    // The file system under the loop device may add or drop a block of its own meanwhile.
    EXPECT_NEAR(before - backing_bytes(), 12 * kSlotBytes, kSlotBytes / 2);
    AlignedBuffer memory = aligned_buffer(4096, kSlotBytes);
    Operation read{.kind = Kind::read, .slot = slots[0], .buffer = {memory.get(), kSlotBytes}};
    volume->submit(read);
    while (!volume->poll()) executor_->wait(kForever);
    EXPECT_EQ(read.state, State::done);
}

// Slots, probes and polled rings follow the block size that the kernel asks for, not the one that
// most drives have.
TEST_F(RawDevice, LargerBlocksThanUsual) {
    const LoopDevice large(directory_ / "large", 64 * kMiB, 16384);
    if (!large.why_not().empty()) GTEST_SKIP() << large.why_not();
    for (const BackendKind kind : {BackendKind::uring, BackendKind::posix}) {
        VolumeOptions wanted = options();
        wanted.backend = kind;
        wanted.sqpoll = kind == BackendKind::uring;
        wanted.paths[0].path = large.name();
        wanted.classes[0].slot_bytes = 20000;
        testing::internal::CaptureStderr();
        const auto volume = open(wanted);
        const std::string said = testing::internal::GetCapturedStderr();
        EXPECT_EQ(said.find("does not work"), std::string::npos) << said;
        EXPECT_EQ(volume->alignment(), 16384);
        EXPECT_EQ(volume->slot_bytes(0), 32768);
        EXPECT_TRUE(volume->direct(0));
        AlignedBuffer memory = aligned_buffer(16384, 32768);
        memset(memory.get(), 6, 32768);
        Operation operation{
            .slot = volume->allocate(0), .offset = 16384, .buffer = {memory.get(), 16384}};
        for (const Kind one : {Kind::write, Kind::read}) {
            operation.kind = one;
            volume->submit(operation);
            while (!volume->poll()) executor_->wait(kForever);
            EXPECT_EQ(operation.state, State::done) << strerror(operation.error);
        }
    }
}

TEST_F(RawDevice, TooSmall) {
    VolumeOptions wanted = options();
    wanted.classes[0].slots = 1000;
    EXPECT_THROW(open(wanted), Error);
    EXPECT_EQ(first_bytes(), std::string(8, '\0'));
}

}  // namespace
}  // namespace ferry::aio
