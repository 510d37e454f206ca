#include <gtest/gtest.h>

#include <limits>

#include "bound.h"

namespace ferry::train {
namespace {

constexpr double kInfinite = std::numeric_limits<double>::infinity();

BoundInput billion() {
    return {
        .kernel_seconds = 0.1,
        .parameters = 1e9,
        .weight_bytes = 2,
        .wire_bytes = 2,
        .device_bytes = 0,
        .host_bytes = kInfinite,
        .nvme_bytes = kInfinite,
        .speeds = {.copy_bytes_per_s = 50e9, .nvme_bytes_per_s = 4e9, .dram_bytes_per_s = 160e9}};
}

TEST(LowerBound, WithAmpleHostMemoryDramBinds) {
    const Bound bound = lower_bound(billion());
    EXPECT_EQ(bound.binding, "dram");
    EXPECT_NEAR(bound.seconds, (28.0 + 4 + 2) / 160,
                1e-9);  // update, weights up twice, gradients down
    EXPECT_EQ(bound.state_in_host, 1);
}

TEST(LowerBound, ComputeBindsWhenItIsSlowest) {
    BoundInput input = billion();
    input.kernel_seconds = 3;
    EXPECT_EQ(lower_bound(input).binding, "compute");
    EXPECT_EQ(lower_bound(input).seconds, 3);
}

TEST(LowerBound, WhatTheHostCannotHoldGoesToNvmeAndBack) {
    BoundInput input = billion();
    input.host_bytes = 2e9;  // the weights; no state
    const Bound bound = lower_bound(input);
    EXPECT_EQ(bound.binding, "nvme");
    EXPECT_NEAR(bound.seconds, 24.0 / 4, 1e-9);
    EXPECT_EQ(bound.weights_on_nvme, 0);
    input.host_bytes = 8e9;  // half of the state
    EXPECT_NEAR(lower_bound(input).seconds, 12.0 / 4, 1e-9);
}

TEST(LowerBound, WeightsOnTheDeviceNeedNoCopies) {
    BoundInput input = billion();
    input.speeds.copy_bytes_per_s = 5e9;
    EXPECT_EQ(lower_bound(input).binding, "host to device");
    input.device_bytes = kInfinite;
    EXPECT_NEAR(lower_bound(input).seconds, 2.0 / 5, 1e-9);  // the gradients' way down
}

TEST(LowerBound, IsInfiniteWhenNothingIsAdmissible) {
    BoundInput input = billion();
    input.host_bytes = input.nvme_bytes = 1e9;
    EXPECT_EQ(lower_bound(input).seconds, kInfinite);
}

}  // namespace
}  // namespace ferry::train
