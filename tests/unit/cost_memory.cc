// A step's host memory traffic has the same sum wherever it is summed.
#include <gtest/gtest.h>

#include "cost/estimate.h"
#include "cost/measurements.h"
#include "cost/simulator.h"

namespace ferry::cost {
namespace {

constexpr double kDram = 1e10, kLink = 2e9, kBytes = 1 << 20;

Measurements machine(bool computes_on_host) {
    return {.copy_bytes_per_s = kLink,
            .nvme_bytes_per_s = kLink,
            .dram_per_nvme_byte = 2,
            .dram_bytes_per_s = kDram,
            .computes_on_host = computes_on_host};
}

// Bytes that pass through host memory while the task runs.
double simulated(swap::Lane lane, swap::Verb verb, const Measurements& measured) {
    const swap::CostModel model = cost_model([](const swap::Task&) { return Work{}; }, measured);
    const swap::Cost cost =
        model({.verb = verb, .lane = lane, .bytes = static_cast<int64_t>(kBytes)});
    return cost.seconds * cost.part[static_cast<size_t>(swap::Shared::dram)] * kDram;
}

// The same by the planner's sums, in which memory is the slowest link.
double estimated(const PlacedTraffic& traffic, Measurements measured) {
    constexpr double kSlow = 1e3;
    measured.dram_bytes_per_s = kSlow;
    return step_seconds(traffic, {}, {}, measured).committed * kSlow;
}

class MemoryTraffic : public testing::TestWithParam<bool> {};

TEST_P(MemoryTraffic, OfCopiesIsTheSameInEstimateAndSimulator) {
    const Measurements measured = machine(GetParam());
    const double bytes = dram_bytes(0, kBytes, 0, measured);
    EXPECT_EQ(bytes, (GetParam() ? 2 : 1) * kBytes);
    EXPECT_NEAR(simulated(swap::Lane::h2d, swap::Verb::copy, measured), bytes, 1);
    EXPECT_NEAR(simulated(swap::Lane::d2h, swap::Verb::copy, measured), bytes, 1);
    EXPECT_NEAR(estimated({.up_bytes = kBytes}, measured), bytes, 1);
    EXPECT_NEAR(estimated({.down_bytes = kBytes}, measured), bytes, 1);
}

TEST_P(MemoryTraffic, OfStorageIsTheSameInEstimateAndSimulator) {
    const Measurements measured = machine(GetParam());
    const double bytes = dram_bytes(0, 0, kBytes, measured);
    EXPECT_EQ(bytes, 2 * kBytes);
    EXPECT_NEAR(simulated(swap::Lane::read, swap::Verb::read, measured), bytes, 1);
    EXPECT_NEAR(simulated(swap::Lane::write, swap::Verb::write, measured), bytes, 1);
    EXPECT_NEAR(estimated({.stored_bytes = kBytes}, measured), bytes, 1);
}

INSTANTIATE_TEST_SUITE_P(Devices, MemoryTraffic, testing::Bool(),
                         [](const auto& device) { return device.param ? "Processors" : "Gpu"; });

// What a file has of a machine stays, and what was measured beside it is not lost.
TEST(Measurements, AreFilledFieldByField) {
    const Measurements measured{.copy_bytes_per_s = 1,
                                .nvme_bytes_per_s = 2,
                                .nvme_at_once = 3,
                                .dram_bytes_per_s = 4,
                                .update_overhead_s = 5,
                                .out_of_place = 6,
                                .check_bytes_per_s = 7,
                                .momentum_bytes_per_s = 8,
                                .device_bytes_per_s = 9,
                                .device_copy_bytes_per_s = 10};
    const Measurements found = known_or({.copy_bytes_per_s = 11}, measured);
    EXPECT_EQ(found.copy_bytes_per_s, 11);
    EXPECT_EQ(found.nvme_bytes_per_s, 2);
    EXPECT_EQ(found.nvme_at_once, 3);
    EXPECT_EQ(found.dram_bytes_per_s, 4);
    EXPECT_EQ(found.update_overhead_s, 5);
    EXPECT_EQ(found.out_of_place, 6);
    EXPECT_EQ(found.check_bytes_per_s, 7);
    EXPECT_EQ(found.momentum_bytes_per_s, 8);
    EXPECT_EQ(found.device_bytes_per_s, 9);
    EXPECT_EQ(found.device_copy_bytes_per_s, 10);
    // Nobody copied within the device: as its updates.
    EXPECT_EQ(known_or({.device_bytes_per_s = 12}, {}).device_copy_bytes_per_s, 12);
}

}  // namespace
}  // namespace ferry::cost
