// One suite for both executors.
#include <gtest/gtest.h>

#include <vector>

#include "ferry/executor.h"

namespace ferry {
namespace {

class ExecutorContract : public testing::TestWithParam<const char*> {
protected:
    static std::unique_ptr<Executor> make(uint64_t seed = 1) {
        return std::string(GetParam()) == "threads" ? make_thread_executor()
                                                    : make_simulated_executor(seed);
    }
};

struct Recorder {
    Executor* executor = nullptr;
    std::vector<uint64_t> ran{};
    std::atomic<int> done = 0;
    static Job job(Recorder& recorder, uint64_t argument) {
        return {[](void* context, uint64_t value) {
                    auto& self = *static_cast<Recorder*>(context);
                    self.ran.push_back(value);
                    self.done.fetch_add(1, std::memory_order_release);
                    self.executor->wake();
                },
                &recorder, argument};
    }
    void wait_for(int count) {
        while (done.load(std::memory_order_acquire) < count) executor->wait(kForever);
    }
};

TEST_P(ExecutorContract, ALaneRunsItsJobsInOrder) {
    const auto executor = make();
    const LaneId lane = executor->add_lane("lane");
    Recorder recorder{executor.get()};
    for (uint64_t i = 0; i < 500; ++i) executor->post(lane, Recorder::job(recorder, i));
    recorder.wait_for(500);
    for (uint64_t i = 0; i < 500; ++i) EXPECT_EQ(recorder.ran[i], i);
}

TEST_P(ExecutorContract, AFullLaneKeepsOrderWhileItIsRefilled) {
    const auto executor = make();
    const LaneId lane = executor->add_lane("lane", 3);
    Recorder recorder{executor.get()};
    for (uint64_t i = 0; i < 300; ++i) {
        // A job counts itself done a moment before its place in the lane is free.
        recorder.wait_for(static_cast<int>(i) - 1);
        executor->post(lane, Recorder::job(recorder, i));
    }
    recorder.wait_for(300);
    for (uint64_t i = 0; i < 300; ++i) EXPECT_EQ(recorder.ran[i], i);
}

TEST_P(ExecutorContract, WaitReturnsWhenTimeIsUp) {
    const auto executor = make();
    const Nanos start = executor->now();
    executor->wait(start + 2'000'000);
    EXPECT_GE(executor->now(), start + 2'000'000);
}

TEST_P(ExecutorContract, AWakeBeforeTheWaitIsNotLost) {
    const auto executor = make();
    executor->wake();
    executor->wait(kForever);
}

INSTANTIATE_TEST_SUITE_P(Both, ExecutorContract, testing::Values("threads", "simulated"));

// Two lanes whose interleaving the seed decides.
std::vector<uint64_t> interleaving(uint64_t seed) {
    const auto executor = make_simulated_executor(seed);
    const LaneId a = executor->add_lane("a"), b = executor->add_lane("b");
    Recorder recorder{executor.get()};
    for (uint64_t i = 0; i < 20; ++i) {
        executor->post(a, Recorder::job(recorder, i));
        executor->post(b, Recorder::job(recorder, 100 + i));
    }
    recorder.wait_for(40);
    return recorder.ran;
}

TEST(SimulatedExecutor, TheSameSeedRunsTheSameOrder) {
    EXPECT_EQ(interleaving(5), interleaving(5));
    EXPECT_NE(interleaving(5), interleaving(6));
}

TEST(SimulatedExecutorDeath, WaitingForNothingIsADeadlock) {
    const auto executor = make_simulated_executor(1);
    EXPECT_DEATH(executor->wait(kForever), "deadlock");
}

}  // namespace
}  // namespace ferry
