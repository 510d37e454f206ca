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

}  // namespace
}  // namespace ferry::cost
