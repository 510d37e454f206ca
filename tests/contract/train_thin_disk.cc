// A budget that is real on a disk that is not: thinly provisioned, it promises more than it has.
// The run finds out before its first step, for every slot is written once at the start.
#include <gtest/gtest.h>
#include <sys/statvfs.h>

#include <cstdlib>
#include <filesystem>
#include <memory>

#include "tests/support/loop_device.h"
#include "tests/support/plan_for.h"
#include "tests/support/tiny_run.h"

namespace ferry::train {
namespace {

// ext4 of 32 MiB on a device whose sparse image lies in a tmpfs of 16 MiB.
class ThinDisk {
public:
    ThinDisk() {
        std::filesystem::create_directory(directory_ / "memory");
        memory_ = std::make_unique<Mounted>("none", directory_ / "memory", "tmpfs", "size=16m");
        if (!(why_not_ = memory_->why_not()).empty()) return;
        device_ = std::make_unique<LoopDevice>(directory_ / "memory/image", 32 * kMiB);
        if (!(why_not_ = device_->why_not()).empty()) return;
        const std::string make =
            "mkfs.ext4 -q -F -O ^has_journal " + device_->name() + " > /dev/null 2>&1";
        if (std::system(make.c_str()) != 0) {
            why_not_ = "no mkfs.ext4";
            return;
        }
        std::filesystem::create_directory(path());
        disk_ = std::make_unique<Mounted>(device_->name(), path(), "ext4", "nodiscard");
        why_not_ = disk_->why_not();
    }
    std::string path() const { return directory_ / "disk"; }
    const std::string& why_not() const { return why_not_; }

    // Takes all of the memory behind the device but so much; 0 gives it back.
    void leave(int64_t bytes) {
        std::filesystem::remove(filler());
        struct statvfs room {};
        ASSERT_EQ(statvfs((directory_ / "memory").c_str(), &room), 0);
        const auto free_bytes = static_cast<int64_t>(room.f_bavail * room.f_frsize);
        ASSERT_GT(free_bytes, bytes);
        directory_.put("memory/filler", std::string(static_cast<size_t>(free_bytes - bytes), 'x'));
    }
    void give_back() { std::filesystem::remove(filler()); }

private:
    std::string filler() const { return directory_ / "memory/filler"; }

    TemporaryDirectory directory_;
    std::string why_not_;
    // In the order they stand on each other; the last is unmounted first.
    std::unique_ptr<Mounted> memory_;
    std::unique_ptr<LoopDevice> device_;
    std::unique_ptr<Mounted> disk_;
};

TEST(ThinDisk, IsFoundOutBeforeTheFirstStepAndTheNextRunWorks) {
    ThinDisk disk;
    if (!disk.why_not().empty()) GTEST_SKIP() << disk.why_not();
    const TinyData data;
    Config config = tiny_config_on_nvme(data);
    config.budgets.nvme = {{.path = disk.path(), .size_bytes = 16 * kMiB}};
    config.swap.state_on_nvme = 1;
    const auto executor = make_thread_executor();
    const TinyOutcome memory = run_tiny(tiny_config(data), {.executor = executor.get()});
    disk.leave(128 * kKiB);
    if (HasFatalFailure()) return;
    try {
        Engine::make(config, {.executor = executor.get()});
        ADD_FAILURE() << "a disk of 128 KiB took " << plan_for(config).nvme_bytes << " bytes";
    } catch (const Error& error) {
        // The write of a slot, or of the volume's header where other blocks of the image came
        // first.
        const bool named =
            error.trouble() == Trouble::io || error.trouble() == Trouble::does_not_fit;
        EXPECT_TRUE(named) << error.what();
        EXPECT_NE(error.problem().where.find(disk.path()), std::string::npos) << error.what();
        EXPECT_FALSE(error.problem().remedy.empty()) << error.what();
    }
    disk.give_back();
    EXPECT_EQ(run_tiny(config, {.executor = executor.get()}).hash, memory.hash);
}

}  // namespace
}  // namespace ferry::train
