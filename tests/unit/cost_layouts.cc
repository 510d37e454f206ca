// Layouts of many ranks, against figures that can be had by hand.
#include "cost/layouts.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>

namespace ferry::cost {
namespace {

constexpr double kInfinite = std::numeric_limits<double>::infinity();

// Parameters: 12 hidden^2 a block.
ModelSizes model_of(int64_t hidden, int64_t blocks, int64_t sequences) {
    const auto width = static_cast<double>(hidden);
    return {.hidden = hidden,
            .blocks = blocks,
            .heads = hidden / 128,
            .kv_heads = hidden / 128,
            .block_elements = 12 * width * width,
            .table_elements = 51'200 * width,
            .attention_flops = 4 * 1024 * width,
            .sequence = 2048,
            .sequences = sequences,
            .element = {.wire = 2, .weight = 2}};
}
Cluster cluster_of(int64_t ranks, int64_t on_a_host) {
    const Measurements host{.copy_bytes_per_s = 5e10,
                            .nvme_bytes_per_s = 4e9,
                            .dram_bytes_per_s = 4e11,
                            .device_bytes_per_s = 2e12,
                            .computes_on_host = false,
                            .comm_bytes_per_s = 3e11,
                            .assumed_flops_per_s = 6e14};
    return {.ranks = ranks,
            .on_a_host = on_a_host,
            .measured = of_rank(host, static_cast<int>(on_a_host)),
            .device_bytes = 79e9,
            .host_bytes = 1e12,
            .network_bytes_per_s = 5e10,
            .latency_s = 2e-5};
}

void expect_whole(const Layout& l) {
    EXPECT_NEAR(l.compute_seconds + l.bubble_seconds + l.exchange_seconds + l.update_seconds,
                l.seconds, 1e-9 * l.seconds);
}

// One rank with all in its memory: forward, backward with forward again, and the head once.
TEST(Layouts, OfOneRankAreItsProducts) {
    const ModelSizes model = model_of(1024, 16, 8);
    Cluster cluster = cluster_of(1, 1);
    cluster.network_bytes_per_s = 0;
    const std::vector<Layout> found = best_layouts(model, cluster, 4);
    ASSERT_EQ(found.size(), 1U);
    const Layout& best = found.front();
    const double tokens = 8 * 2048;
    const double flops = tokens * (4 * 16 * (2 * model.block_elements + model.attention_flops) +
                                   3 * 2 * model.table_elements);
    EXPECT_NEAR(best.compute_seconds, flops / 6e14, 1e-9);
    EXPECT_EQ(best.exchange_seconds, 0);
    EXPECT_EQ(best.bubble_seconds, 0);
    EXPECT_EQ(best.tensor_bytes + best.pipeline_bytes + best.zero_bytes, 0);
    expect_whole(best);
}

// Stages that are alike and a network that is not felt.
TEST(Layouts, HaveTheBubbleOfTheory) {
    ModelSizes model = model_of(8192, 32, 8);
    model.table_elements = 0;
    Cluster cluster = cluster_of(4, 4);
    cluster.measured.comm_bytes_per_s = 1e18;
    const Layout l =
        weigh(model, cluster, {.tensor = 1, .pipeline = 4, .replicas = 1, .micro_batches = 8})
            .layout;
    EXPECT_NEAR(l.bubble_seconds / (l.compute_seconds + l.bubble_seconds), 3.0 / 11, 1e-6);
    expect_whole(l);
}

// The sums of two ranks: half of each input, five times a block, both halves of a sum.
TEST(Layouts, SendTheBytesOfTheirSums) {
    const ModelSizes model = model_of(4096, 10, 4);
    const Cluster cluster = cluster_of(4, 4);
    const Layout l =
        weigh(model, cluster, {.tensor = 2, .pipeline = 1, .replicas = 2, .micro_batches = 2})
            .layout;
    const double input = 2048.0 * 4096 * 2;
    EXPECT_DOUBLE_EQ(l.tensor_bytes, 2 * 10 * 5 * input);
    const double elements = 10 * model.block_elements / 2 + 2 * model.table_elements;
    EXPECT_DOUBLE_EQ(l.zero_bytes, 0.5 * elements * 2 * 2);
    EXPECT_DOUBLE_EQ(
        weigh(model, cluster, {.tensor = 1, .pipeline = 2, .replicas = 2, .micro_batches = 2})
            .layout.pipeline_bytes,
        2 * 2 * input);
}

// Where the network is slow block inputs alone cross it: a stage lies inside a host.
TEST(Layouts, OfASlowNetworkPassBlockInputs) {
    const ModelSizes model = model_of(5120, 40, 512);
    Cluster cluster = cluster_of(64, 8);
    const std::vector<Layout> fast = best_layouts(model, cluster, 4);
    cluster.network_bytes_per_s = 1e8;
    const std::vector<Layout> slow = best_layouts(model, cluster, 4);
    ASSERT_EQ(fast.size(), 4U);
    ASSERT_EQ(slow.size(), 4U);
    EXPECT_LE(slow.front().tensor * slow.front().replicas, 8);
    EXPECT_GT(slow.front().seconds, fast.front().seconds);
    // With the network of a host the same ranks need no pipeline.
    EXPECT_EQ(best_layouts(model, cluster_of(8, 8), 1).front().pipeline, 1);
    for (const auto& layouts : {fast, slow}) {
        for (const Layout& l : layouts) {
            EXPECT_EQ(l.tensor * l.pipeline * l.replicas, 64);
            EXPECT_EQ(l.micro_batch * l.micro_batches * l.replicas, 512);
            EXPECT_EQ(8 % l.tensor, 0);  // inside a host
            EXPECT_LE(l.device_bytes, cluster.device_bytes);
            EXPECT_GE(l.seconds, layouts.front().seconds);
            expect_whole(l);
        }
    }
}

// What does not fit a device goes to its host, and further where that is small.
TEST(Layouts, GoToTheTierThatHasRoom) {
    const ModelSizes model = model_of(4096, 64, 64);  // 13 B: 180 GB of state and gradients
    Cluster cluster = cluster_of(1, 1);
    cluster.network_bytes_per_s = 0;
    EXPECT_EQ(best_layouts(model, cluster, 1).front().state, StateOn::host);
    cluster.host_bytes = 1e11;
    EXPECT_TRUE(best_layouts(model, cluster, 1).empty());
    cluster.nvme_bytes = kInfinite;
    const Layout stored = best_layouts(model, cluster, 1).front();
    EXPECT_EQ(stored.state, StateOn::nvme);
    EXPECT_GT(stored.update_seconds, 0);  // the drive binds
    cluster = cluster_of(8, 8);
    EXPECT_EQ(best_layouts(model, cluster, 1).front().state, StateOn::device);
}

// A trillion parameters on ten thousand ranks; batches that divide.
TEST(Layouts, OfATrillionParametersAreFound) {
    const ModelSizes model = model_of(25'600, 128, 3'200);
    const Cluster cluster = cluster_of(9'600, 8);
    const std::vector<Layout> found = best_layouts(model, cluster, 4);
    ASSERT_EQ(found.size(), 4U);
    EXPECT_GT(found.front().tensor * found.front().pipeline, 1);
    // No faster than all products on all ranks.
    const double flops =
        3'200.0 * 2048 * 4 * 128 * (2 * model.block_elements + model.attention_flops);
    EXPECT_GT(found.front().seconds, flops / (9'600 * 6e14));
}

}  // namespace
}  // namespace ferry::cost
