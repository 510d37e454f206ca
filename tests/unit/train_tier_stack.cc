// The tier stack, stage by stage, on a directory and on a device that counts what it page-locks.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <filesystem>
#include <iterator>
#include <mutex>
#include <thread>

#include "ferry/error.h"
#include "tests/support/plan_for.h"
#include "tests/support/tiny_run.h"
#include "train/measuring/measure.h"
#include "train/stack/threads.h"
#include "train/stack/tier_stack.h"
#include "train/state/state_io.h"
#include "train/step/step.h"

namespace ferry::train {
namespace {

// The CPU device as a GPU: page-locks, and refuses to from the n-th call on.
class LockingDevice final : public Device {
public:
    LockingDevice(Executor& executor, int refuses_at)
        : inner_(Device::open(DeviceKind::cpu, executor)), refuses_at_(refuses_at) {
        for (const StreamKind kind : {StreamKind::compute, StreamKind::h2d, StreamKind::d2h})
            streams_[static_cast<size_t>(kind)] = &inner_->stream(kind);
    }
    ~LockingDevice() override { EXPECT_EQ(locked_bytes(), 0) << "pages that stay locked"; }

    int64_t locked_bytes() const { return locked_bytes_; }

    DeviceKind kind() const noexcept override { return DeviceKind::cuda; }
    std::string architecture() const override { return "locking"; }
    int64_t overhead_bytes() const override { return 0; }
    int64_t free_bytes() const override { return kUnlimited; }
    void reserve(int64_t bytes) override { inner_->reserve(bytes); }
    std::span<std::byte> memory() noexcept override { return inner_->memory(); }
    void lock_pages(std::span<std::byte> host) override {
        if (calls_++ >= refuses_at_)
            throw Error(Trouble::does_not_fit, {.what = "no more pages can be locked"});
        locked_bytes_ += std::ssize(host);
    }
    void unlock_pages(std::span<std::byte> host) noexcept override {
        locked_bytes_ -= std::ssize(host);
    }
    void check() override { inner_->check(); }

private:
    const std::unique_ptr<Device> inner_;
    const int refuses_at_;
    std::atomic<int> calls_ = 0;
    std::atomic<int64_t> locked_bytes_ = 0;
};

// Computes nothing.
class IdleKernels final : public swap::Kernels {
public:
    explicit IdleKernels(bool fails) : fails_(fails) {}
    void run(const swap::Call& call) noexcept override {
        ++calls;
        if (fails_) call.store->fail(Error(Trouble::internal, {.what = "a kernel that fails"}));
    }
    std::string describe(const swap::Call&) const override { return "idle"; }

    static inline std::atomic<int> calls = 0;

private:
    const bool fails_;
};

int64_t threads_here() {
    return std::distance(std::filesystem::directory_iterator("/proc/self/task"), {});
}

// The faults of a test, by stage.
struct Faults {
    bool machine_is_small = false;    // plan
    int refuses_lock_at = INT_MAX;    // reserve, fill
    int64_t host_bytes = kUnlimited;  // reserve
    bool path_is_missing = false;     // open
    bool kernels_are_missing = false;
    bool kernels_fail = false;  // warm
    bool contents_fail = false;
};

class Stack {
public:
    explicit Stack(const TemporaryDirectory& storage, const Faults& faults = {})
        : faults_(faults), config_(tiny_config_on_nvme(data_)) {
        config_.budgets.nvme.front().path = storage.path();
        // State for all three tiers, and more of it in host memory than the smallest part that
        // is page-locked.
        config_.model.hidden = config_.model.intermediate = 256;
        config_.model.head_dim = 128;
        config_.budgets.device_bytes = 6 * kMiB;
        config_.budgets.host_bytes = 8 * kMiB;
        plan_ = plan_for(config_);
        if (faults.path_is_missing) config_.budgets.nvme.front().path = storage / "missing";
        share_ = share_of(config_, {});
        Topology machine = machine_for(config_);
        if (faults.machine_is_small) machine.memory_left_bytes = 1;
        stack_.emplace(TierStack::Ground{.config = config_,
                                         .share = share_,
                                         .executor = *executor_,
                                         .device = device_,
                                         .machine = machine},
                       std::nullopt);
    }

    TierStack* operator->() { return &*stack_; }
    TierStack& operator*() { return *stack_; }
    LockingDevice& device() { return device_; }
    const Config& config() const { return config_; }

    void plan() { stack_->plan(plan_); }
    void reserve() {
        stack_->reserve({.host_budget_bytes = std::min(faults_.host_bytes, plan_.host_bytes)});
    }
    void open() {
        IdleKernels::calls = 0;
        stack_->open({.lays_out_later = true,
                      .instead = [this](StepKernels&) -> std::unique_ptr<swap::Kernels> {
                          if (faults_.kernels_are_missing)
                              throw Error(Trouble::internal, {.what = "no kernels"});
                          return std::make_unique<IdleKernels>(faults_.kernels_fail);
                      }});
    }
    void warm() { stack_->warm(step_, {}); }
    void fill() {
        stack_->fill([this] {
            stack_->lock_homes();
            for (const planner::Chunk& chunk : stack_->plan().chunks)
                if (chunk.trainable) put(chunk.state);
            if (faults_.contents_fail) throw Error(Trouble::io, {.what = "no contents"});
        });
    }
    void all() {
        plan();
        reserve();
        open();
        step_ = record_step(stack_->plan(), Previous::not_speculative, false);
        warm();
        fill();
    }

    void put(swap::ObjectId object) {
        std::ranges::fill(buffer(object), static_cast<std::byte>(object + 1));
        if (const auto home = stack_->store().in_host(object); !home.empty())
            std::ranges::fill(home, static_cast<std::byte>(object + 1));
        else
            stack_->store().put(object, buffer(object));
    }
    bool holds(swap::ObjectId object) {
        std::ranges::fill(buffer(object), std::byte{0});
        stack_->store().get(object, buffer(object));
        return std::ranges::all_of(buffer(object), [&](std::byte byte) {
            return byte == static_cast<std::byte>(object + 1);
        });
    }

private:
    std::span<std::byte> buffer(swap::ObjectId object) {
        return StateIo::staging_of(stack_->plan(), stack_->arena())
            .front()
            .state.first(static_cast<size_t>(stack_->plan().objects[object].bytes));
    }

    const Faults faults_;
    const TinyData data_{};
    Config config_;
    RankShare share_{};
    planner::Plan plan_{};
    const std::unique_ptr<Executor> executor_ = make_thread_executor();
    LockingDevice device_{*executor_, faults_.refuses_lock_at};
    swap::Schedule step_{};
    std::optional<TierStack> stack_{};
};

TEST(TierStack, TakesInEachStageWhatItSays) {
    const TemporaryDirectory storage;
    Stack stack(storage);
    EXPECT_TRUE(stack->plan().chunks.empty());

    stack.plan();
    const planner::Plan& plan = stack->plan();
    ASSERT_GT(plan.nvme_bytes, 0);
    EXPECT_TRUE(stack.device().memory().empty());

    stack.reserve();
    EXPECT_EQ(std::ssize(stack.device().memory()), plan.device_bytes);
    EXPECT_EQ(std::ssize(stack->arena()), plan.host_bytes);
    const int64_t buffers = stack.device().locked_bytes();
    EXPECT_GE(buffers, plan.io_bytes);
    ASSERT_LT(buffers, plan.host_bytes);
    EXPECT_TRUE(storage.empty());

    stack.open();
    EXPECT_FALSE(storage.empty());
    EXPECT_EQ(IdleKernels::calls, 0);

    const swap::Schedule step = record_step(plan, Previous::not_speculative, false);
    stack->warm(step, {});
    EXPECT_GT(IdleKernels::calls, 0);
    EXPECT_EQ(stack.device().locked_bytes(), buffers);

    stack.fill();
    EXPECT_EQ(stack.device().locked_bytes(), plan.host_bytes);
    for (const planner::Chunk& chunk : plan.chunks) {
        if (!chunk.trainable) continue;
        EXPECT_TRUE(stack.holds(chunk.state)) << chunk.state;
    }

    stack->close();
    EXPECT_TRUE(storage.empty());
    EXPECT_EQ(stack.device().locked_bytes(), 0);
    stack->close();
}

TEST(TierStack, NeedsNoWarmth) {
    const TemporaryDirectory storage;
    Stack stack(storage);
    stack.plan();
    stack.reserve();
    stack.open();
    stack.fill();
    EXPECT_EQ(IdleKernels::calls, 0);
}

TEST(TierStack, OpensBuffersAloneWithoutFiles) {
    const TemporaryDirectory storage;
    Stack stack(storage);
    stack.plan();
    stack.reserve();
    stack->open({.buffers_alone = true});
    EXPECT_TRUE(storage.empty());
    EXPECT_EQ(stack->volume(), nullptr);
}

// As much as the budget has room for, in memory that may hold anything.
TEST(TierStack, TimesUpdatesInTheArenaThatIsStillEmpty) {
    const TemporaryDirectory storage;
    Stack stack(storage);
    stack.plan();
    stack.reserve();
    const planner::Plan& plan = stack->plan();
    std::ranges::fill(stack->arena(), std::byte{0xff});
    const UpdateRates found = time_updates_before_fill(*stack, {.host_bytes = plan.host_bytes},
                                                       optim::scalars_of({}, 1, 1.0));
    EXPECT_GT(found.bytes_per_s, 0);
    EXPECT_GE(found.out_of_place, 1);
    ASSERT_GT(found.memory_bytes, 0);
    EXPECT_LE(found.memory_bytes, std::min(plan.host_bytes, footprint_of_updates(plan)));
    const int64_t untouched = std::ranges::count(stack->arena(), std::byte{0xff});
    const int64_t zero = std::ranges::count(stack->arena(), std::byte{0});
    EXPECT_EQ(zero + untouched, std::ssize(stack->arena()));
    EXPECT_GE(zero, found.memory_bytes);
}

TEST(TierStackDeathTest, TimesNoUpdatesInMemoryThatHasContents) {
    GTEST_FLAG_SET(death_test_style, "threadsafe");
    const TemporaryDirectory storage;
    Stack stack(storage);
    stack.plan();
    stack.reserve();
    stack.open();
    EXPECT_DEATH(time_updates_before_fill(*stack, {}, optim::scalars_of({}, 1, 1.0)),
                 "has contents");
}

TEST(TierStackDeathTest, RefusesAStageOutOfItsTurn) {
    GTEST_FLAG_SET(death_test_style, "threadsafe");
    const TemporaryDirectory storage;
    Stack stack(storage);
    EXPECT_DEATH(stack.reserve(), "out of its turn");
    EXPECT_DEATH(stack.open(), "out of its turn");
    stack.plan();
    EXPECT_DEATH(stack.plan(), "out of its turn");
    EXPECT_DEATH(stack.fill(), "out of its turn");
    stack->close();
    EXPECT_DEATH(stack.reserve(), "out of its turn");
}

// No files, no locked pages, and once the stack is gone no threads.
void expect_nothing_is_left(const Faults& faults, Trouble trouble, const std::string& says) {
    SCOPED_TRACE(says);
    const TemporaryDirectory storage;
    std::thread([] {}).join();  // with the first one a sanitizer begins a thread of its own
    const int64_t threads = threads_here();
    {
        Stack stack(storage, faults);
        try {
            stack.all();
            ADD_FAILURE() << "nothing went wrong";
        } catch (const Error& error) {
            EXPECT_EQ(error.trouble(), trouble);
            EXPECT_THAT(error.what(), testing::HasSubstr(says));
        }
        EXPECT_TRUE(storage.empty());
        EXPECT_EQ(stack.device().locked_bytes(), 0);
        EXPECT_TRUE(stack->arena().empty());
    }
    for (int i = 0; i < 1000 && threads_here() > threads; ++i)  // joined, and not quite gone
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
    EXPECT_LE(threads_here(), threads);
}

TEST(TierStack, LeavesNothingBehindWhereAStageFails) {
    using enum Trouble;
    expect_nothing_is_left({.machine_is_small = true}, does_not_fit, "");
    expect_nothing_is_left({.host_bytes = 4096}, does_not_fit, "budgets.host");
    expect_nothing_is_left({.refuses_lock_at = 0}, does_not_fit, "no more pages");
    expect_nothing_is_left({.path_is_missing = true}, usage, "missing");
    expect_nothing_is_left({.kernels_are_missing = true}, internal, "no kernels");
    expect_nothing_is_left({.kernels_fail = true}, internal, "a kernel that fails");
    expect_nothing_is_left({.contents_fail = true}, io, "no contents");
    expect_nothing_is_left({.refuses_lock_at = 1}, does_not_fit, "no more pages");
}

}  // namespace
}  // namespace ferry::train
