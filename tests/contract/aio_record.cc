// Records: what was published is there after a kill or a power failure, and nothing else is taken
// for it. On io_uring, POSIX threads, raw devices and the simulated disk, on one path and on more.
#include <gtest/gtest.h>
#include <sched.h>
#include <signal.h>
#include <sys/mount.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <filesystem>

#include "aio/backend.h"
#include "aio/buffer.h"
#include "aio/header.h"
#include "ferry/aio.h"
#include "tests/support/child.h"
#include "tests/support/loop_device.h"
#include "tests/support/simulated_disk.h"
#include "tests/support/temporary_directory.h"

namespace ferry::aio {
namespace {

constexpr int64_t kSlotBytes = 16384;
constexpr int64_t kSlots = 12;
constexpr int64_t kRecordBytes = 5000;  // no multiple of anything

enum class On : uint8_t { uring, posix, sim, raw };
struct Where {
    const char* name;
    On on;
    size_t paths;
    const char* directory = "/var/tmp";
};
const Where kWheres[] = {{"uring", On::uring, 1},       {"uring_paths", On::uring, 3},
                         {"posix_paths", On::posix, 3}, {"posix_tmpfs", On::posix, 1, "/dev/shm"},
                         {"raw", On::raw, 1},           {"raw_paths", On::raw, 2},
                         {"sim", On::sim, 1},           {"sim_paths", On::sim, 3}};

class Records : public testing::TestWithParam<Where> {
protected:
    void SetUp() override {
        setenv("FERRY_LOG", "error", 1);
        if (GetParam().on == On::uring && !why_no_uring().empty())
            GTEST_SKIP() << "no io_uring here: " << why_no_uring();
        if (GetParam().on == On::sim) {
            executor_ = make_simulated_executor(7);
            disk_ = std::make_unique<SimulatedDisk>(SimulatedDiskOptions{.seed = 7}, *executor_);
        } else {
            executor_ = make_thread_executor();
        }
        memory_ = aligned_buffer(4096, kSlotBytes);
        for (size_t p = 0; GetParam().on == On::raw && p < GetParam().paths; ++p) {
            const std::string image = directory_ / ("image" + std::to_string(p));
            devices_.push_back(std::make_unique<LoopDevice>(image, 8 * kMiB));
            if (!devices_[p]->why_not().empty()) GTEST_SKIP() << devices_[p]->why_not();
        }
    }

    VolumeOptions options(Leftover leftover = Leftover::remove) const {
        VolumeOptions made{
            .classes = {{"a", kSlotBytes, kSlots}, {"b", 4096, 3}},
            .backend = GetParam().on == On::posix ? BackendKind::posix : BackendKind::automatic,
            .block_bytes = 8192,
            .queue_depth = 4,
            .operations_max = 8,
            .leftover = leftover,
            .run_id = 7,
            .write_once = !disk_,
            .record_bytes = kRecordBytes};
        for (size_t p = 0; p < GetParam().paths; ++p)
            made.paths.push_back({.path = disk_              ? std::to_string(p)
                                          : devices_.empty() ? path(p)
                                                             : devices_[p]->name(),
                                  .size_bytes = 2 * kMiB,
                                  .raw_device = !devices_.empty()});
        return made;
    }
    std::string path(size_t p) const {
        std::filesystem::create_directories(directory_ / std::to_string(p));
        return directory_ / std::to_string(p);
    }
    void open(const VolumeOptions& wanted) {
        volume_ = disk_ ? open_simulated_volume(wanted, *executor_, *disk_)
                        : Volume::open(wanted, *executor_);
    }
    std::string why_not(const VolumeOptions& wanted) {
        try {
            open(wanted);
        } catch (const Error& error) {
            return error.what();
        }
        return "";
    }

    void transfer(Kind kind, SlotId slot) {
        Operation operation{.kind = kind, .slot = slot, .buffer = {memory_.get(), kSlotBytes}};
        volume_->submit(operation);
        while (volume_->poll() != &operation) executor_->wait(kForever);
        ASSERT_EQ(operation.state, State::done);
    }
    void write(SlotId slot, int value) {
        memset(memory_.get(), value, kSlotBytes);
        transfer(Kind::write, slot);
    }
    int read(SlotId slot) {
        transfer(Kind::read, slot);
        const std::byte first = memory_.get()[0];
        EXPECT_TRUE(std::all_of(memory_.get(), memory_.get() + kSlotBytes,
                                [&](std::byte b) { return b == first; }));
        return static_cast<int>(first);
    }
    void publish(const std::vector<SlotId>& slots) {
        memcpy(volume_->record().data(), slots.data(), slots.size() * sizeof(SlotId));
        volume_->publish(static_cast<int64_t>(slots.size() * sizeof(SlotId)));
        finish_publication();
    }
    void finish_publication() {
        while (!volume_->published()) {
            EXPECT_EQ(volume_->poll(), nullptr);
            if (!volume_->published()) executor_->wait(kForever);
        }
    }
    std::vector<SlotId> found(size_t n) const {
        const auto record = volume_->found_record(n);
        std::vector<SlotId> slots(record.size() / sizeof(SlotId));
        if (!slots.empty()) memcpy(slots.data(), record.data(), record.size());
        return slots;
    }
    // A run that publishes twice: slots of value 1, then others of value 2.
    void run() { run(options()); }
    void run(const VolumeOptions& wanted) {
        published_.clear();
        open(wanted);
        for (int version = 1; version <= 2; ++version) {
            std::vector<SlotId> slots;
            for (int i = 0; i < 4; ++i) {
                slots.push_back(volume_->allocate(0));
                write(slots.back(), version);
            }
            publish(slots);
            published_.push_back(slots);
        }
    }
    // One byte of the newer copy, at the end of the first file of the first path.
    void damage_newest_copy() {
        if (disk_) {
            auto& file = disk_->contents(0, 0);
            file[file.size() - 4096 + 70] ^=
                std::byte{1};  // all that was written of the second copy
            return;
        }
        const bool raw = !devices_.empty();
        std::fstream file(raw ? devices_[0]->name() : path(0) + "/ferry.slots0",
                          std::ios::in | std::ios::out | std::ios::binary);
        Header header{};
        if (raw) file.read(reinterpret_cast<char*>(&header), sizeof header);
        const auto end = raw ? header.device_end : int64_t{file.seekg(0, std::ios::end).tellg()};
        const auto at = end - 8192 + 70;
        const int byte = file.seekg(at).peek();
        file.seekp(at).put(static_cast<char>(byte ^ 1));
    }
    std::string header(size_t p) const { return path(p) + "/ferry.volume"; }

    TemporaryDirectory directory_{GetParam().directory};
    std::unique_ptr<Executor> executor_;
    std::unique_ptr<SimulatedDisk> disk_;
    std::vector<std::unique_ptr<LoopDevice>> devices_;
    std::unique_ptr<Volume> volume_;
    AlignedBuffer memory_;
    std::vector<std::vector<SlotId>> published_;
};

TEST_P(Records, WhatWasPublishedIsThereAgain) {
    run();
    volume_.reset();
    open(options(Leftover::resume));
    EXPECT_EQ(found(0), published_[1]);
    EXPECT_EQ(found(1), published_[0]);
    EXPECT_TRUE(found(2).empty());
    EXPECT_FALSE(volume_->take(1, published_[1])) << "slots of another class";
    const std::vector<SlotId> twice{published_[1][0], published_[1][0]};
    EXPECT_FALSE(volume_->take(0, twice));
    ASSERT_TRUE(volume_->take(0, published_[1]));
    EXPECT_FALSE(volume_->take(0, published_[1])) << "they are in use";
    for (const SlotId slot : published_[1]) EXPECT_EQ(read(slot), 2);
    // Slots that were taken are not handed out again, and all others are.
    for (int64_t i = 4; i < kSlots; ++i) {
        const SlotId slot = volume_->allocate(0);
        ASSERT_NE(slot, kNoSlot);
        EXPECT_EQ(std::ranges::count(published_[1], slot), 0);
    }
    EXPECT_EQ(volume_->allocate(0), kNoSlot);
}

TEST_P(Records, ADamagedCopyLeavesTheOtherAndIsOverwrittenFirst) {
    run();
    volume_.reset();
    damage_newest_copy();
    open(options(Leftover::resume));
    EXPECT_EQ(found(0), published_[0]);
    EXPECT_TRUE(found(1).empty());
    ASSERT_TRUE(volume_->take(0, published_[0]));
    const std::vector<SlotId> next{volume_->allocate(0)};
    write(next[0], 3);
    publish(next);
    volume_.reset();
    open(options(Leftover::resume));
    EXPECT_EQ(found(0), next);
    EXPECT_EQ(found(1), published_[0]);
}

TEST_P(Records, GoingOnFromTheOlderOneKeepsIt) {
    run();
    volume_.reset();
    open(options(Leftover::resume));
    volume_->resume_from(1);
    ASSERT_TRUE(volume_->take(0, published_[0]));
    const std::vector<SlotId> next{volume_->allocate(0)};
    write(next[0], 3);
    publish(next);
    volume_.reset();
    open(options(Leftover::resume));
    EXPECT_EQ(found(0), next);
    EXPECT_EQ(found(1), published_[0]);
}

TEST_P(Records, TransfersGoOnWhileARecordIsPublished) {
    open(options());
    const SlotId one = volume_->allocate(0), other = volume_->allocate(0);
    write(one, 1);
    memcpy(volume_->record().data(), &one, sizeof one);
    volume_->publish(sizeof one);
    for (int i = 0; i < 20; ++i) {
        write(other, i);
        EXPECT_EQ(read(other), i);
    }
    finish_publication();
    EXPECT_EQ(read(one), 1);
}

// A record may be published before the layout is finished, or where there is none.
TEST_P(Records, WhatWasPublishedDoesNotDependOnTheLayout) {
    enum { none, unfinished, finished_after };
    for (const auto layout : {none, unfinished, finished_after}) {
        VolumeOptions wanted = options(Leftover::remove_any);
        wanted.write_once = layout != none;
        wanted.lays_out_later = true;
        run(wanted);
        if (layout == finished_after) volume_->finish_layout();
        volume_.reset();
        wanted.leftover = Leftover::resume;
        ASSERT_EQ(why_not(wanted), "") << layout;
        EXPECT_EQ(found(0), published_[1]);
        EXPECT_EQ(found(1), published_[0]);
        ASSERT_TRUE(volume_->take(0, published_[1]));
        for (const SlotId slot : published_[1]) EXPECT_EQ(read(slot), 2);
        volume_.reset();
    }
}

class RecordsOnSim : public Records {};

// The contents of such a copy are not known, so it counts neither as whole nor as absent.
TEST_P(RecordsOnSim, ACopyThatCannotBeReadIsNotTakenForAbsent) {
    run();
    std::array<int, 3> opened{};  // with so many copies unreadable
    for (int attempt = 0; attempt < 40; ++attempt) {
        volume_.reset();
        const int64_t before = disk_->injected(Fault::eio);
        disk_->trouble({.eio = 0.5}, -1);
        open(options(Leftover::resume));
        disk_->heal();
        const auto failed = static_cast<size_t>(disk_->injected(Fault::eio) - before);
        ++opened.at(failed);
        for (size_t n = 0; n < 2; ++n) {
            if (n < 2 - failed) {
                EXPECT_EQ(found(n).size(), 4u);
                continue;
            }
            try {
                static_cast<void>(volume_->found_record(n));
                ADD_FAILURE() << "an unreadable copy was found";
            } catch (const Error& error) {
                const std::string text = error.what();
                EXPECT_EQ(error.trouble(), Trouble::io);
                EXPECT_NE(text.find("reading a record failed: Input/output"), std::string::npos)
                    << text;
            }
        }
        EXPECT_TRUE(found(2).empty());
    }
    for (const int count : opened) EXPECT_GT(count, 0);
    volume_.reset();
    open(options(Leftover::resume));
    EXPECT_EQ(found(0), published_[1]) << "what could not be read was changed";
    EXPECT_EQ(found(1), published_[0]);
}

// ---------------------------------------------------------------- real files

class RecordsOnFiles : public Records {
protected:
    // The process is killed: with a record published or not, at step 41.
    void leave_killed(bool with_record) {
        const int status = in_child([&] {
            static_cast<void>(executor_.release());  // its threads did not survive the fork
            executor_ = make_thread_executor();
            if (with_record) {
                run();
            } else {
                open(options());
            }
            volume_->note_step(41);
            return kill(getpid(), SIGKILL);
        });
        ASSERT_TRUE(WIFSIGNALED(status));
    }
    void expect_refused(const VolumeOptions& wanted, const std::string& words) {
        const std::string before = directory_.contents("0/ferry.volume");
        const std::string why = why_not(wanted);
        EXPECT_NE(why.find(words), std::string::npos) << why;
        EXPECT_EQ(directory_.contents("0/ferry.volume"), before) << "refusing changed the header";
    }
};

TEST_P(RecordsOnFiles, AKilledRunWithoutARecordSaysWhichStateIsLost) {
    leave_killed(false);
    expect_refused(options(Leftover::resume), "not consistent, state of step 41 lost");
    expect_refused(options(Leftover::refuse), "not consistent, state of step 41 lost");
    EXPECT_EQ(why_not(options(Leftover::remove)), "");
}

TEST_P(RecordsOnFiles, ARunThatEndsWithAnErrorLeavesAHeaderThatSaysWhichStateIsLost) {
    open(options());
    volume_->note_lost();
    volume_.reset();
    EXPECT_FALSE(std::filesystem::exists(header(0))) << "there was no state yet";
    open(options());
    volume_->note_step(41);
    volume_->note_lost();
    volume_.reset();
    EXPECT_FALSE(std::filesystem::exists(path(0) + "/ferry.slots0")) << "its space is given back";
    expect_refused(options(Leftover::resume), "not consistent, state of step 41 lost");
    expect_refused(options(Leftover::refuse), "a run that ended with an error");
    for (const Leftover leftover : {Leftover::remove, Leftover::reuse}) {
        open(options());
        volume_->note_step(41);
        volume_->note_lost();
        volume_.reset();
        VolumeOptions other = options(leftover);
        other.run_id = 8;  // nobody can miss what lies there
        open(other);
        write(volume_->allocate(0), 3);
        volume_.reset();
        EXPECT_FALSE(std::filesystem::exists(header(0)));
    }
}

TEST_P(RecordsOnFiles, WhatWasPublishedOutlivesAnError) {
    run();
    volume_->note_step(41);
    volume_->note_lost();
    volume_.reset();
    open(options(Leftover::resume));
    EXPECT_EQ(found(0).size(), 4u);
}

TEST_P(RecordsOnFiles, AKilledRunsRecordIsKeptUntilThatIsGivenUp) {
    leave_killed(true);
    for (const Leftover leftover : {Leftover::remove, Leftover::reuse, Leftover::refuse}) {
        expect_refused(options(leftover), "the durable state of a run is kept here");
        expect_refused(options(leftover), "last committed step 41");
    }
    EXPECT_EQ(why_not(options(Leftover::resume)), "");
    EXPECT_EQ(found(0).size(), 4u);
    volume_.reset();
    for (const bool write_once : {true, false}) {
        VolumeOptions other = options(Leftover::remove_any);
        other.record_bytes = 0;
        other.write_once = write_once;
        EXPECT_EQ(why_not(other), "");
        volume_.reset();
        EXPECT_FALSE(std::filesystem::exists(header(0))) << "nothing was published this time";
        run();
        volume_.reset();
    }
}

// A refused one takes nothing from what was there, whatever it was refused for.
TEST_P(RecordsOnFiles, WhatIsGivenUpGoesLast) {
    run();
    volume_.reset();
    const auto expect_kept = [&](const std::string& after) {
        SCOPED_TRACE(after);
        open(options(Leftover::resume));
        EXPECT_EQ(found(0), published_[1]);
        ASSERT_TRUE(volume_->take(0, published_[1]));
        EXPECT_EQ(read(published_[1][0]), 2);
        volume_.reset();
    };
    VolumeOptions large = options(Leftover::remove_any);
    large.classes[0].slots *= 1000;
    EXPECT_NE(why_not(large), "");
    expect_kept("too little room");
    enum : int { kOpened = 42, kRefused = 43 };
    // Ends by itself, or is killed, before anything of it is published.
    const auto start = [&](__rlimit_resource what, rlim_t most, bool killed) {
        const int status = in_child([&] {
            static_cast<void>(executor_.release());
            executor_ = make_thread_executor();
            signal(SIGXFSZ, SIG_IGN);  // the log may be a file beyond the limit
            const rlimit limit{.rlim_cur = most, .rlim_max = most};
            setrlimit(what, &limit);
            if (!why_not(options(Leftover::remove_any)).empty()) return int{kRefused};
            write(volume_->allocate(0), 9);
            volume_->note_step(0);
            if (killed) kill(getpid(), SIGKILL);
            volume_.reset();
            return int{kOpened};
        });
        return WIFEXITED(status) ? WEXITSTATUS(status) : int{kOpened};
    };
    // Less than one slot: in eight files, which a probe under load may ask for, more would do.
    EXPECT_EQ(start(RLIMIT_FSIZE, kSlotBytes / 2, false), kRefused);
    expect_kept("a file's size");
    const int next = dup(0);
    close(next);
    int refused = 0;
    for (rlim_t spare = 0;; ++spare, ++refused) {
        if (start(RLIMIT_NOFILE, static_cast<rlim_t>(next) + spare, true) == kOpened) break;
        expect_kept(std::to_string(spare) + " descriptors");
    }
    EXPECT_GT(refused, 2);
    if (GetParam().directory != std::string("/dev/shm")) {  // memory holds one of both at a time
        expect_kept("killed");
        EXPECT_EQ(start(RLIMIT_NOFILE, 1000, false), kOpened);
        expect_kept("ended");
    }
    run(options(Leftover::remove_any));
    volume_.reset();
    expect_kept("replaced by this record");
    for (size_t p = 0; p < GetParam().paths; ++p) {
        for (const auto& file : std::filesystem::directory_iterator(path(p))) {
            const std::string name = file.path().filename();
            EXPECT_TRUE(name == "ferry.volume" || name.starts_with("ferry.slots")) << name;
        }
    }
}

// There is no room for both: it goes before the other's space is taken, where that will do.
TEST_P(RecordsOnFiles, WhatIsGivenUpMakesRoom) {
    run();
    volume_.reset();
    VolumeOptions tight = options(Leftover::remove_any);
    for (PathOptions& one : tight.paths) {
        int64_t bytes = kHeaderBytes;
        for (const auto& file : std::filesystem::directory_iterator(one.path))
            bytes += static_cast<int64_t>(file.file_size());
        one.size_bytes = bytes;
    }
    run(tight);
    volume_.reset();
    open(options(Leftover::resume));
    EXPECT_EQ(found(0), published_[1]);
}

// A file system that is full, but for what goes.
TEST(RecordsOnASmallDisk, WhatIsGivenUpMakesRoom) {
    setenv("FERRY_LOG", "error", 1);
    const TemporaryDirectory directory;
    const LoopDevice disk(directory / "image", 24 * kMiB);
    if (!disk.why_not().empty()) GTEST_SKIP() << disk.why_not();
    const std::string mounted = directory / "mounted";
    std::filesystem::create_directory(mounted);
    const std::string make = "mkfs.ext4 -q -F -O ^has_journal -m 0 " + disk.name() + " 2>&1";
    // A namespace of its own, so that the mount goes with it.
    const int status = in_child([&] {
        if (system(make.c_str()) != 0 || unshare(CLONE_NEWNS) != 0 ||
            mount(nullptr, "/", nullptr, MS_REC | MS_PRIVATE, nullptr) != 0 ||
            mount(disk.name().c_str(), mounted.c_str(), "ext4", 0, nullptr) != 0)
            return 77;
        const auto executor = make_thread_executor();
        VolumeOptions wanted{.paths = {{.path = mounted, .files = 1}},
                             .classes = {{"a", 64 * kKiB, 200}},
                             .leftover = Leftover::remove_any,
                             .run_id = 7,
                             .record_bytes = kRecordBytes};
        const auto published = [&](const VolumeOptions& options) {
            const auto volume = Volume::open(options, *executor);
            if (options.leftover == Leftover::resume) return volume->found_record(0)[0];
            volume->record()[0] = std::byte{static_cast<unsigned char>(options.classes[0].slots)};
            volume->publish(1);
            while (!volume->published()) {
                volume->poll();
                if (!volume->published()) executor->wait(kForever);
            }
            return volume->record()[0];
        };
        published(wanted);
        wanted.classes[0].slots = 210;  // half the disk and more, as before
        published(wanted);
        VolumeOptions large = wanted;
        large.classes[0].slots = 360;  // more than there is, also alone
        bool refused = false;
        try {
            published(large);
        } catch (const Error& error) {
            refused = error.trouble() == Trouble::does_not_fit;
        }
        if (!refused) return 1;
        wanted.leftover = Leftover::resume;
        return published(wanted) == std::byte{210} ? 0 : 2;
    });
    ASSERT_TRUE(WIFEXITED(status));
    if (WEXITSTATUS(status) == 77) GTEST_SKIP() << "no file system can be mounted here";
    EXPECT_EQ(WEXITSTATUS(status), 0);
}

TEST_P(RecordsOnFiles, WhatIsNotProvedIsRefused) {
    expect_refused(options(Leftover::resume), "there is nothing to resume");
    EXPECT_FALSE(std::filesystem::exists(header(0))) << "a refused attempt left a header";
    directory_.put("0/ferry.volume", "");
    expect_refused(options(Leftover::resume), "there is nothing to resume");
    EXPECT_TRUE(std::filesystem::exists(header(0))) << "a refused attempt removed a header";
    run();
    volume_.reset();
    VolumeOptions other = options(Leftover::resume);
    other.run_id = 8;
    expect_refused(other, "of another run");
    other = options(Leftover::resume);
    ++other.classes[0].slots;
    expect_refused(other, "laid out by another plan");
    other = options(Leftover::resume);
    other.record_bytes += 1;
    expect_refused(other, "laid out by another plan");
    other.record_bytes = 0;
    expect_refused(other, "checkpoint.durable_steps is false");
    const std::string slot_file = path(0) + "/ferry.slots0";
    const auto size = static_cast<int64_t>(std::filesystem::file_size(slot_file));
    std::filesystem::resize_file(slot_file, static_cast<uintmax_t>(size - 4096));
    expect_refused(options(Leftover::resume), "not as it was laid out");
    std::filesystem::remove(slot_file);
    expect_refused(options(Leftover::resume), "a slot file is missing");
}

TEST_P(RecordsOnFiles, DamagedHeadersAreRefused) {
    run();
    volume_.reset();
    const std::string good = directory_.contents("0/ferry.volume");
    const auto put = [&](const std::string& bytes) { directory_.put("0/ferry.volume", bytes); };
    for (const size_t bytes : {size_t{8}, size_t{200}}) {
        put(good.substr(0, bytes));
        for (const Leftover leftover : {Leftover::resume, Leftover::remove}) {
            expect_refused(options(leftover), "truncated");
            expect_refused(options(leftover), "put the header back as the run left it");
        }
    }
    put("");
    for (const Leftover leftover : {Leftover::resume, Leftover::remove, Leftover::remove_any}) {
        expect_refused(options(leftover), "the files beside it may be whole");
        EXPECT_TRUE(std::filesystem::exists(header(0))) << "refusing removed the empty header";
    }
    expect_refused(options(Leftover::resume), "its header is missing or empty");
    expect_refused(options(Leftover::remove), "put the header back as the run left it");
    std::filesystem::remove(header(0));
    expect_refused(options(Leftover::resume), "its header is missing");
    expect_refused(options(Leftover::resume), "the files beside it may be whole");
    expect_refused(options(Leftover::remove_any), "put its ferry.volume back");
    EXPECT_FALSE(std::filesystem::exists(header(0))) << "a refused attempt left a header";
    // Other formats have their checksums elsewhere, or none.
    constexpr size_t kSecond = kHeaderBytes / 2;  // copy
    std::string other = good;
    for (const size_t copy : {size_t{0}, kSecond}) other[copy + 32] ^= 1;
    for (const auto& [version, words] : {std::pair{99, "newer ferry"}, {4, "older ferry"}}) {
        for (const size_t copy : {size_t{0}, kSecond}) other[copy + 8] = static_cast<char>(version);
        put(other);
        expect_refused(options(Leftover::resume), words);
    }
    // A file that was zeroed, cut or overwritten may have been the header of the files beside it.
    for (const std::string& gone :
         {std::string("somebody's diary"), std::string(kHeaderBytes, '\0'), good.substr(0, 1)}) {
        put(gone);
        for (const Leftover leftover : {Leftover::resume, Leftover::remove, Leftover::remove_any})
            expect_refused(options(leftover),
                           "an overwritten header is left here: the files beside it may be whole");
    }
    other = std::string(kSecond, '\0') + good.substr(kSecond);
    other[kSecond + 100] ^= 1;
    put(other);
    expect_refused(options(Leftover::resume), "the header is damaged");
    expect_refused(options(Leftover::remove), "a damaged header is left here");
    // Whatever byte of both is wrong: nothing is resumed by them, nothing removed.
    for (size_t at = 0; at < kSecond; at += at < 192 ? 1 : 97) {
        SCOPED_TRACE("byte " + std::to_string(at));
        other = good;
        for (const size_t copy : {size_t{0}, kSecond})
            other[copy + at] = static_cast<char>(other[copy + at] ^ 1);
        put(other);
        expect_refused(options(Leftover::resume), "the header is damaged");
        expect_refused(options(Leftover::resume), "the files beside it may be whole");
        expect_refused(options(Leftover::remove), "a damaged header is left here");
        expect_refused(options(Leftover::reuse), "put the header back as the run left it");
    }
    put(good);
    EXPECT_EQ(why_not(options(Leftover::resume)), "");
}

// With the checksum that it should have, which whoever writes a header can write too.
TEST_P(RecordsOnFiles, AHeaderThatNoFerryWritesIsRefused) {
    run();
    volume_.reset();
    const std::string good = directory_.contents("0/ferry.volume");
    const auto refused_with = [&](const auto& change, const std::string& words) {
        Header header{};
        memcpy(static_cast<void*>(&header), good.data(), sizeof header);
        change(header);
        header.sum = sum_of(header);
        const std::string copy(reinterpret_cast<const char*>(&header), sizeof header);
        directory_.put("0/ferry.volume", copy + copy);
        expect_refused(options(Leftover::resume), words);
    };
    const std::string never = "says what no ferry writes";
    for (const int files : {INT32_MIN, -1, 0, kFilesMax + 1, INT32_MAX})
        refused_with([&](Header& header) { header.files = files; }, never);
    for (const double speed : {0.0, -1.0, std::nan(""), HUGE_VAL})
        refused_with([&](Header& header) { header.speed = speed; }, never);
    for (const int64_t slots : {INT64_MIN, int64_t{-1}, 2 * kSlots + 1, INT64_MAX})
        refused_with([&](Header& header) { header.layout[0].slots_here = slots; },
                     "laid out by another plan");
    refused_with([](Header& header) { header.layout[0].slots_here = 0; },
                 "fewer slots than its plan");
    directory_.put("0/ferry.volume", good);
    EXPECT_EQ(why_not(options(Leftover::resume)), "");
}

// A byte that the drive lost costs one copy; the other has all that there is to know.
TEST_P(RecordsOnFiles, OneDamagedHeaderOfTwoIsResumedBy) {
    run();
    volume_->note_step(41);
    volume_.reset();
    const std::string good = directory_.contents("0/ferry.volume");
    for (size_t at = 0; at < good.size(); at += 119) {
        SCOPED_TRACE("byte " + std::to_string(at));
        std::string damaged = good;
        damaged[at] = static_cast<char>(damaged[at] ^ 1);
        directory_.put("0/ferry.volume", damaged);
        ASSERT_EQ(why_not(options(Leftover::resume)), "");
        EXPECT_EQ(found(0).size(), 4u);
        EXPECT_EQ(volume_->noted_step(), 41);
        volume_.reset();
    }
    // Where both are whole the one that was written later counts, wherever it lies.
    open(options(Leftover::resume));
    volume_->note_step(42);
    volume_.reset();
    const std::string later = directory_.contents("0/ferry.volume");
    const size_t half = good.size() / 2;
    for (const std::string& mixed :
         {later.substr(0, half) + good.substr(half), good.substr(0, half) + later.substr(half)}) {
        directory_.put("0/ferry.volume", mixed);
        ASSERT_EQ(why_not(options(Leftover::resume)), "");
        EXPECT_EQ(volume_->noted_step(), 42);
        volume_.reset();
    }
}

TEST_P(RecordsOnFiles, AFileRemovedUnderItIsMissed) {
    run();
    EXPECT_EQ(volume_->missing(), "");
    const std::string slot_file = path(0) + "/ferry.slots0", away = slot_file + "-away";
    std::filesystem::rename(slot_file, away);
    EXPECT_EQ(volume_->missing(), slot_file) << "who resumes does not look for it there";
    directory_.put("0/ferry.slots0", "another's");
    EXPECT_EQ(volume_->missing(), slot_file);
    std::filesystem::rename(away, slot_file);
    EXPECT_EQ(volume_->missing(), "") << "it was put back";
    std::filesystem::remove(slot_file);
    EXPECT_EQ(volume_->missing(), slot_file);
    std::filesystem::remove_all(path(0));
    EXPECT_EQ(volume_->missing(), header(0));
}

TEST_P(RecordsOnFiles, AFileOfAnothersNamedAsAHeaderIsNotFerrys) {
    path(0);
    directory_.put("0/ferry.volume", "somebody's diary");
    for (const Leftover leftover : {Leftover::remove, Leftover::remove_any})
        expect_refused(options(leftover), "not ferry's");
}

TEST_P(RecordsOnFiles, AHeaderOverwrittenAndASlotFileCutUnderItAreMissed) {
    run();
    const std::string good = directory_.contents("0/ferry.volume");
    const std::string zeros(kHeaderBytes, '\0');
    const size_t half = good.size() / 2;
    for (const std::string& gone : {std::string(), zeros, good.substr(0, 8)}) {
        directory_.put("0/ferry.volume", gone);
        EXPECT_EQ(volume_->missing(), header(0));
    }
    for (const std::string& enough : {good.substr(0, half) + zeros.substr(half),
                                      zeros.substr(half) + good.substr(half), good}) {
        directory_.put("0/ferry.volume", enough);
        EXPECT_EQ(volume_->missing(), "") << "either copy can be resumed by";
    }
    const std::string slot_file = path(0) + "/ferry.slots0";
    const auto size = std::filesystem::file_size(slot_file);
    std::filesystem::resize_file(slot_file, size - 4096);
    EXPECT_EQ(volume_->missing(), slot_file);
    std::filesystem::resize_file(slot_file, size);
    EXPECT_EQ(volume_->missing(), "");
}

class RecordsOnPaths : public RecordsOnFiles {};

TEST_P(RecordsOnPaths, OfOneRunInTheirOrderOnly) {
    run();
    volume_.reset();
    VolumeOptions wanted = options(Leftover::resume);
    std::swap(wanted.paths[0], wanted.paths[1]);
    expect_refused(wanted, "in their order");
    wanted = options(Leftover::resume);
    wanted.paths.pop_back();
    expect_refused(wanted, "in their order");
    // The second path of another run of the same kind.
    std::filesystem::rename(path(1), directory_ / "first");
    std::filesystem::rename(path(0), directory_ / "kept0");
    std::filesystem::rename(path(2), directory_ / "kept2");
    published_.clear();
    run();
    volume_.reset();
    for (const size_t p : {0u, 2u}) {
        std::filesystem::remove_all(path(p));
        std::filesystem::rename(directory_ / ("kept" + std::to_string(p)), path(p));
    }
    expect_refused(options(Leftover::resume), "of different runs");
    std::filesystem::remove_all(path(1));
    expect_refused(options(Leftover::resume), "there is nothing to resume");
    std::filesystem::rename(directory_ / "first", path(1));
    EXPECT_EQ(why_not(options(Leftover::resume)), "");
}

const auto kName = [](const auto& where) { return std::string(where.param.name); };
INSTANTIATE_TEST_SUITE_P(On, Records, testing::ValuesIn(kWheres), kName);
INSTANTIATE_TEST_SUITE_P(On, RecordsOnSim, testing::ValuesIn(kWheres + 6, std::end(kWheres)),
                         kName);
INSTANTIATE_TEST_SUITE_P(On, RecordsOnFiles, testing::ValuesIn(kWheres, kWheres + 4), kName);
INSTANTIATE_TEST_SUITE_P(On, RecordsOnPaths, testing::Values(kWheres[1], kWheres[2]), kName);

}  // namespace
}  // namespace ferry::aio
