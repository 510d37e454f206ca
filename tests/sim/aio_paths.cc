// Several paths of different speed: what is written is shared out so that they finish together,
// also when a path's speed changes in the middle of a run.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>

#include "aio/buffer.h"
#include "ferry/aio.h"
#include "tests/support/simulated_disk.h"
#include "tests/support/temporary_directory.h"

namespace ferry::aio {
namespace {

constexpr size_t kUnits = 64;
constexpr int64_t kSpare = 16;

VolumeOptions options_for(std::vector<PathOptions> paths, double slack) {
    return {.paths = std::move(paths),
            .classes = {{"state", kMiB, static_cast<int64_t>(kUnits) + kSpare}},
            .block_bytes = 256 * kKiB,
            .operations_max = kSpare,
            .slack = slack};
}

// As a training step does: every unit is read, and written to a fresh slot; then its old one is
// free.
class Steps {
public:
    Steps(Volume& volume, Executor& executor) : volume_(volume), executor_(executor) {
        for (SlotId& slot : slots_) slot = volume_.allocate(0);
    }

    struct Round {
        int writes[2] = {};
        Nanos busy_ns[2] = {};
        // How much longer the slower path took; 1: they finished together.
        double spread() const {
            const auto [least, most] = std::minmax(busy_ns[0], busy_ns[1]);
            return static_cast<double>(most) / static_cast<double>(std::max<Nanos>(least, 1));
        }
    };

    Round run() {
        Round round;
        const Nanos start = executor_.now();
        size_t begun = 0, done = 0;
        std::vector<size_t> idle;
        for (size_t i = 0; i < kSpare; ++i) idle.push_back(i);
        while (done < kUnits) {
            for (; begun < kUnits && !idle.empty(); ++begun) {
                Operation& operation = operations_[idle.back()];
                const SlotId fresh = volume_.allocate(0);
                if (fresh == kNoSlot) break;
                operation = {.kind = Kind::write,
                             .slot = fresh,
                             .buffer = {memory_.get(), static_cast<size_t>(kMiB)},
                             .tag = begun};
                idle.pop_back();
                volume_.submit(operation);
            }
            Operation* operation = nullptr;
            while (!(operation = volume_.poll())) executor_.wait(kForever);
            EXPECT_EQ(operation->state, State::done);
            const auto path = static_cast<size_t>(volume_.path_of(operation->slot));
            ++round.writes[path];
            round.busy_ns[path] = operation->finished_ns - start;
            volume_.free(slots_[operation->tag]);
            slots_[operation->tag] = operation->slot;
            idle.push_back(static_cast<size_t>(operation - operations_));
            ++done;
        }
        return round;
    }

    // Everything at once, as at the start of a step: the shares decide when each path is finished.
    Round read_all() {
        Round round;
        const Nanos start = executor_.now();
        std::vector<SlotId> queues[2];
        for (const SlotId slot : slots_)
            queues[static_cast<size_t>(volume_.path_of(slot))].push_back(slot);
        // Each path gets half of what may be under way, whatever its share.
        Operation operations[2][kSpare / 2];
        size_t next[2] = {}, done = 0;
        const auto submit = [&](size_t path, Operation& operation) {
            if (next[path] == queues[path].size()) return;
            operation = {.kind = Kind::read,
                         .slot = queues[path][next[path]++],
                         .buffer = {memory_.get(), static_cast<size_t>(kMiB)},
                         .tag = path};
            volume_.submit(operation);
        };
        for (size_t path = 0; path < 2; ++path)
            for (Operation& operation : operations[path]) submit(path, operation);
        for (; done < kUnits; ++done) {
            Operation* operation = nullptr;
            while (!(operation = volume_.poll())) executor_.wait(kForever);
            EXPECT_EQ(operation->state, State::done);
            round.busy_ns[operation->tag] = operation->finished_ns - start;
            submit(operation->tag, *operation);
        }
        for (size_t path = 0; path < 2; ++path)
            round.writes[path] = static_cast<int>(queues[path].size());
        return round;
    }

private:
    Volume& volume_;
    Executor& executor_;
    AlignedBuffer memory_ = aligned_buffer(4096, kMiB);
    SlotId slots_[kUnits];
    Operation operations_[kSpare];
};

class Paths : public testing::Test {
protected:
    void open(double first, double second, double slack) {
        disk_ = std::make_unique<SimulatedDisk>(
            SimulatedDiskOptions{.seed = 1, .path_bytes_per_s = {first, second}}, *executor_);
        volume_ = open_simulated_volume(options_for({{.path = "a"}, {.path = "b"}}, slack),
                                        *executor_, *disk_);
        steps_ = std::make_unique<Steps>(*volume_, *executor_);
    }
    Steps::Round after(int rounds) {
        for (int i = 0; i < rounds; ++i) steps_->run();
        return steps_->read_all();
    }

    std::unique_ptr<Executor> executor_ = make_simulated_executor(1);
    std::unique_ptr<SimulatedDisk> disk_;
    std::unique_ptr<Volume> volume_;
    std::unique_ptr<Steps> steps_;
};

TEST_F(Paths, OfDifferentSpeedFinishTogether) {
    open(3e9, 1e9, 1);
    const Steps::Round round = after(100);
    EXPECT_NEAR(round.writes[0], 48, 4) << "three of four are on the path three times as fast";
    EXPECT_LT(round.spread(), 1.2);
    const auto counters = volume_->counters();
    EXPECT_NEAR(counters[0].write_bytes_per_s / counters[1].write_bytes_per_s, 3, 0.5);
}

TEST_F(Paths, OneThatSlowsDownInTheMiddleLosesItsShare) {
    open(2e9, 2e9, 1);
    EXPECT_NEAR(after(40).writes[0], 32, 3);
    disk_->set_path_speed(1, 2e9 / 3);
    const double before = steps_->read_all().spread();
    EXPECT_GT(before, 2.5);
    const Steps::Round round = after(100);
    EXPECT_NEAR(round.writes[0], 48, 4);
    EXPECT_LT(round.spread(), 1.2);
    disk_->set_path_speed(1, 2e9);
    EXPECT_NEAR(after(200).writes[0], 32, 4) << "and gets it back";
}

// Without slots to move to, a share cannot change by more than the spare ones.
TEST_F(Paths, SlackBoundsTheMove) {
    open(2e9, 2e9, 0);
    disk_->set_path_speed(1, 2e9 / 3);
    EXPECT_LE(after(100).writes[0], 32 + kSpare / 2);
}

TEST(RealPaths, ADiskAndMemoryShareTheWork) {
    const TemporaryDirectory disk, memory("/dev/shm");
    auto executor = make_thread_executor();
    auto volume =
        Volume::open(options_for({{.path = disk.path()}, {.path = memory.path()}}, 1), *executor);
    {
        Steps steps(*volume, *executor);
        for (int i = 0; i < 20; ++i) steps.run();
        const Steps::Round round = steps.read_all();
        printf("disk %d, tmpfs %d of 64 slots, the slower one took %.2f times as long\n",
               round.writes[0], round.writes[1], round.spread());
        EXPECT_EQ(round.writes[0] + round.writes[1], static_cast<int>(kUnits));
        EXPECT_GT(round.writes[0], 0);
        EXPECT_GT(round.writes[1], 0);
    }
    for (const PathCounters& path : volume->counters()) {
        EXPECT_GT(path.bytes_written, 0) << path.path;
        EXPECT_EQ(path.errors, 0) << path.path;
    }
}

}  // namespace
}  // namespace ferry::aio
