// A rehearsal on every kind of device that this machine has, with its state spread over real tiers.
// It has the same bits wherever state lies, moves the bytes that its plan says, and keeps as much
// on the device as was asked for.
#include <gtest/gtest.h>

#include "planner/recording/recorder.h"
#include "tests/support/temporary_directory.h"
#include "train/prediction/rehearsal.h"
#include "train/step/step.h"

namespace ferry::train {
namespace {

using swap::Lane;
using swap::Tier;

constexpr int64_t kBlocks = 3, kElements = 5 * 8192, kChunk = 8192;
constexpr double kState = double(kBlocks * kElements + 2 * 4096);  // elements, edge layers included

struct Shares {  // of the state; the host has the rest
    double device = 0, nvme = 0;
};

class RehearsalOn : public testing::TestWithParam<DeviceKind> {
protected:
    void SetUp() override {
        try {
            Device::open(GetParam(), *make_thread_executor());
        } catch (const Error& error) {
            if (GetParam() == DeviceKind::cpu) throw;
            GTEST_SKIP() << error.what();
        }
    }

    Config config(Shares shares, DeviceKind kind = GetParam()) const {
        Config config;
        config.device = kind;
        config.precision = DType::bf16;
        config.threads = 2;
        config.swap.chunk_elements = kChunk;
        config.swap.speculate = Speculate::off;
        config.swap.state_on_device = shares.device;
        config.swap.state_on_nvme = shares.nvme;
        if (shares.nvme > 0) config.budgets.nvme = {{.path = directory_.path()}};
        return config;
    }

    Rehearsal& start(const Config& config, double compute_seconds = 0) {
        rehearsal_.reset();
        executor_ = make_thread_executor();
        rehearsal_ = Rehearsal::make(config,
                                     {.parameters = kBlocks * kElements,
                                      .layers = kBlocks,
                                      .compute_seconds = compute_seconds},
                                     {.executor = executor_.get()});
        return *rehearsal_;
    }

    // First and last, with updates between: two passes, and the one that a step begins with.
    std::pair<uint64_t, uint64_t> hashes(const Config& config) {
        Rehearsal& rehearsal = start(config);
        const uint64_t first = rehearsal.state_hash();
        rehearsal.measure();  // on the same buffers
        for (const Pass pass : {Pass::swap_in, Pass::optimizer, Pass::step, Pass::optimizer})
            rehearsal.run(pass);
        return {first, rehearsal.state_hash()};
    }

    TemporaryDirectory directory_;
    std::unique_ptr<Executor> executor_;
    std::unique_ptr<Rehearsal> rehearsal_;
};

constexpr std::array<Shares, 7> kPlacements{
    {{0, 0}, {0.3, 0}, {1, 0}, {0, 1}, {0.5, 0.5}, {0.3, 0.4}, {0.7, 0.3}}};

LaneBytes optimizer_bytes(const planner::Plan& plan) {
    planner::Recorder recorder(plan, "", planner::Recorder::Keep::bytes);
    for (int64_t c = 0; c < std::ssize(plan.chunks); ++c)
        recorder.update_chunk(c, cost::Op::update);
    return recorder.bytes();
}

TEST_P(RehearsalOn, UpdatesTheSameWhereverTheStateLies) {
    const auto reference = hashes(config({}, DeviceKind::cpu));
    EXPECT_NE(reference.first, reference.second);
    for (const Shares& shares : kPlacements)
        EXPECT_EQ(hashes(config(shares)), reference) << shares.device << ", " << shares.nvme;
}

TEST_P(RehearsalOn, KeepsAsMuchOnTheDeviceAsAskedFor) {
    const double chunk = kChunk / kState;
    for (const Shares& shares : kPlacements) {
        const Rehearsal& rehearsal = start(config(shares));
        EXPECT_LE(rehearsal.state_on(Tier::device), shares.device + 1e-9);
        EXPECT_GE(rehearsal.state_on(Tier::device), shares.device - chunk);
        EXPECT_GE(rehearsal.state_on(Tier::nvme), shares.nvme - 1e-9);
        EXPECT_LE(rehearsal.state_on(Tier::nvme), shares.nvme + 2 * chunk);
        double by_plan = 0;
        for (const planner::Chunk& c : rehearsal.plan().chunks)
            by_plan += rehearsal.plan().updates_on_device(c) ? double(c.count) : 0;
        EXPECT_DOUBLE_EQ(rehearsal.state_on(Tier::device), by_plan / kState);
    }
}

TEST_P(RehearsalOn, MovesAndUpdatesWhatThePlanSays) {
    for (const Shares& shares : kPlacements) {
        Rehearsal& rehearsal = start(config(shares));
        const planner::Plan& plan = rehearsal.plan();
        for (const auto& [pass, planned] :
             {std::pair(Pass::optimizer, optimizer_bytes(plan)),
              std::pair(Pass::step, step_bytes(plan, Previous::not_speculative, false))}) {
            const PassReport report = rehearsal.run(pass);
            for (size_t lane = 0; lane < swap::kLanes; ++lane)
                EXPECT_EQ(report.lanes[lane].bytes, planned[lane])
                    << swap::name_of(static_cast<Lane>(lane)) << " with " << shares.device;
            // p, m, v read and written, the gradient read, the weight written.
            const double on_device = rehearsal.state_on(Tier::device) * kState * 28;
            EXPECT_DOUBLE_EQ(rehearsal.bytes_of_pass(pass, Lane::compute), on_device);
            EXPECT_DOUBLE_EQ(rehearsal.bytes_of_pass(pass, Lane::team), kState * 28 - on_device);
            const auto& compute = report.lanes[static_cast<size_t>(Lane::compute)];
            EXPECT_EQ(compute.busy_ns > 0, pass == Pass::step || shares.device > 0);
        }
    }
}

TEST_P(RehearsalOn, PausesTakeTheDeviceItsTime) {
    constexpr double kSeconds = 0.06;
    Rehearsal& rehearsal = start(config({0.5, 0.5}), kSeconds);
    const PassReport report = rehearsal.run(Pass::step);
    const auto& compute = report.lanes[static_cast<size_t>(Lane::compute)];
    EXPECT_GE(report.seconds, kSeconds * 0.999);  // a block's part is cut to nanoseconds
    EXPECT_GE(compute.busy_ns, static_cast<Nanos>(kSeconds * 0.999e9));
}

TEST_P(RehearsalOn, ABudgetWithoutRoomForTheStateIsRefusedAndTheOneItNamesWorks) {
    if (GetParam() == DeviceKind::cuda)
        GTEST_SKIP() << "what a process holds of a GPU varies by more than this state";
    Config tight = config({0.8, 0});
    const planner::Plan without_state = start(config({})).plan();
    tight.budgets.device_bytes =
        without_state.device_bytes + without_state.device_overhead_bytes + kMiB / 8;
    std::string remedy;
    try {
        start(tight);
        FAIL() << "state was kept without room for it";
    } catch (const Error& error) {
        EXPECT_EQ(error.trouble(), Trouble::does_not_fit);
        EXPECT_EQ(error.problem().where, "budgets.device, swap.state_on_device");
        remedy = error.problem().remedy;
    }
    const std::string before = "set budgets.device to ";
    ASSERT_TRUE(remedy.starts_with(before)) << remedy;
    tight.budgets.device_bytes = std::stoll(remedy.substr(before.size()));
    EXPECT_GE(start(tight).state_on(Tier::device), 0.8 - kChunk / kState);
}

INSTANTIATE_TEST_SUITE_P(All, RehearsalOn, testing::Values(DeviceKind::cpu, DeviceKind::cuda),
                         [](const auto& test) {
                             return test.param == DeviceKind::cpu ? "cpu" : "cuda";
                         });

}  // namespace
}  // namespace ferry::train
