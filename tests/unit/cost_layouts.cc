// Layouts of many ranks, against figures that can be had by hand.
#include "cost/layouts.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <vector>

namespace ferry::cost {
namespace {

constexpr double kInfinite = std::numeric_limits<double>::infinity();

// Parameters: 12 hidden^2 a block, two norms and a final one.
ModelSizes model_of(int64_t hidden, int64_t blocks, int64_t sequences) {
    return {.hidden = hidden,
            .blocks = blocks,
            .heads = hidden / 128,
            .kv_heads = hidden / 128,
            .head_dim = 128,
            .intermediate = 4 * hidden,
            .mlp_columns = 8 * hidden,
            .block = {.inner = 8 * hidden * hidden,
                      .of_queries = 2 * hidden * hidden,
                      .of_keys = 2 * hidden * hidden,
                      .whole = 2 * hidden},
            .vocab = 51'200,
            .head_whole = hidden,
            .attention_flops = 4 * 1024 * static_cast<double>(hidden),
            .sequence = 2048,
            .sequences = sequences,
            .residual = 2,
            .element = {.wire = 2, .weight = 2},
            .shares_rows = false};
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
double table_of(const ModelSizes& model) { return static_cast<double>(model.vocab * model.hidden); }
double flops_of_a_block(const ModelSizes& model) {
    return 2 * static_cast<double>(model.block.inner + model.block.of_queries +
                                   model.block.of_keys) +
           model.attention_flops;
}
double products_of(const ModelSizes& model) {
    const auto tokens = static_cast<double>(model.sequences * model.sequence);
    return tokens * (4 * static_cast<double>(model.blocks) * flops_of_a_block(model) +
                     3 * 2 * table_of(model));
}
std::vector<Layout> best_of(const ModelSizes& model, const Cluster& cluster, size_t most) {
    return best_layouts(model, cluster, most).best;
}
Layout layout_of(const ModelSizes& model, const Cluster& cluster, const Layout& layout) {
    return weigh(model, cluster, layout).layout;
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
    const std::vector<Layout> found = best_of(model, cluster, 4);
    ASSERT_EQ(found.size(), 1U);
    const Layout& best = found.front();
    EXPECT_NEAR(best.compute_seconds, products_of(model) / 6e14, 1e-9);
    EXPECT_EQ(best.exchange_seconds, 0);
    EXPECT_EQ(best.bubble_seconds, 0);
    EXPECT_EQ(best.sent_bytes(), 0);
    expect_whole(best);
}

// Replicas alone: gradients are scattered and weights gathered once, with stage 3 blocks' twice;
// of N ranks each has 1/N of the state (Rajbhandari et al., ZeRO, 2020).
TEST(Layouts, OfReplicasAloneAreZeros) {
    const ModelSizes model = model_of(4096, 8, 64);
    const Cluster cluster = cluster_of(8, 8);
    for (const int64_t ranks : {2, 4, 8}) {
        const auto n = static_cast<double>(ranks);
        const double elements = model.parameters(),
                     blocks = static_cast<double>(model.blocks * model.block.all());
        for (const int64_t stage : {1, 3}) {
            const Layout l = layout_of(
                model, cluster, {.replicas = ranks, .zero_stage = stage, .micro_batches = 4});
            // Norms are cut into whole shards.
            EXPECT_NEAR(l.zero_bytes, (n - 1) / n * 2 * (2 * elements + (stage == 3 ? blocks : 0)),
                        2e-4 * l.zero_bytes);
            EXPECT_NEAR(static_cast<double>(l.state_bytes), elements / n * 14,
                        2e-4 * static_cast<double>(l.state_bytes));
            EXPECT_EQ(l.zero_bytes, l.sent_bytes());
            EXPECT_EQ(l.across_hosts_bytes, 0);
            EXPECT_EQ(l.bubble_seconds, 0);
        }
    }
}

// ---------------------------------------------------------------- ranks that share tensors

// The sums of two ranks: half of each input, five times a block, both halves of a sum. Of the
// embedding one, of the head one and 24 bytes a token.
TEST(Layouts, SendTheBytesOfTheirSums) {
    const ModelSizes model = model_of(4096, 10, 4);
    const Cluster cluster = cluster_of(4, 4);
    const Layout l = layout_of(model, cluster, {.tensor = 2, .replicas = 2, .micro_batches = 2});
    const double input = 2048.0 * 4096 * 2;
    EXPECT_DOUBLE_EQ(l.tensor_bytes, 2 * ((10 * 5 + 2) * input + 24 * 2048));
    const double elements = (10 * 12 * 4096.0 * 4096 + 2 * table_of(model)) / 2,
                 norms = 21 * 4096 + 4096;  // the final one fills two shards
    EXPECT_DOUBLE_EQ(l.zero_bytes, 0.5 * (elements + norms) * 2 * 2);
    EXPECT_DOUBLE_EQ(layout_of(model, cluster, {.pipeline = 2, .replicas = 2, .micro_batches = 2})
                         .pipeline_bytes,
                     2 * 2 * input);
}

// With the rows of the residual stream divided too: eleven ways a block, but block inputs of half
// the tokens, in memory and between stages.
TEST(Layouts, OfDividedRowsPassAndKeepAPart) {
    ModelSizes model = model_of(4096, 10, 4);
    const Cluster cluster = cluster_of(4, 4);
    const Layout of{.tensor = 2, .pipeline = 2, .micro_batches = 4, .groups = 4};
    const Layout whole = layout_of(model, cluster, of);
    model.shares_rows = true;
    const Layout part = layout_of(model, cluster, of);
    const double input = 2048.0 * 4096 * 2;
    EXPECT_DOUBLE_EQ(whole.tensor_bytes, 4 * ((5 * 5 + 1) * input + 24 * 2048));
    EXPECT_DOUBLE_EQ(part.tensor_bytes, 4 * ((5 * 5.5 + 1) * input + 24 * 2048));
    EXPECT_DOUBLE_EQ(part.pipeline_bytes, whole.pipeline_bytes / 2);
    // Of two groups each of five blocks', and of the two on their way.
    EXPECT_DOUBLE_EQ(whole.device_bytes - part.device_bytes, (2 * 5 + 2) * input / 2);
}

// Tables are by rows: state, products and memory go down with more ranks a group.
TEST(Layouts, DivideTheTables) {
    ModelSizes model = model_of(2048, 1, 8);
    model.vocab = 256'000;  // nearly all of it
    Cluster cluster = cluster_of(8, 8);
    cluster.measured.comm_bytes_per_s = 1e18;
    const Layout one = layout_of(model, cluster, {.micro_batches = 8});
    const Layout four = layout_of(model, cluster, {.tensor = 4, .micro_batches = 8});
    EXPECT_NEAR(four.compute_seconds, one.compute_seconds / 4, 1e-3 * one.compute_seconds);
    EXPECT_NEAR(static_cast<double>(four.state_bytes), static_cast<double>(one.state_bytes) / 4,
                1e-3 * static_cast<double>(one.state_bytes));
    EXPECT_NEAR(four.seconds, one.seconds / 4, 0.01 * one.seconds);
    // Of rows that do not divide the first rank has one more, in each table.
    model.vocab = 256'001;
    EXPECT_EQ(layout_of(model, cluster, {.tensor = 4}).state_bytes - four.state_bytes,
              2 * 4096 * 14);
}

TEST(Layouts, OfMoreRanksThanHeadsOfKeysHaveOneEach) {
    ModelSizes model = model_of(4096, 8, 8);
    model.kv_heads = 2;
    model.block.of_keys /= 16;
    const Cluster cluster = cluster_of(8, 8);
    const auto state_of = [&](int64_t tensor) {
        return layout_of(model, cluster, {.tensor = tensor}).state_bytes;
    };
    const int64_t keys = 8 * model.block.of_keys,
                  all = 8 * (model.block.inner + model.block.of_queries);
    EXPECT_EQ(state_of(2) - state_of(4), 14 * (all / 4 + 2 * table_of(model) / 4));
    EXPECT_EQ(state_of(1) - state_of(2), 14 * (keys / 2 + all / 2 + table_of(model)));
}

// Heads of keys that do not divide: some ranks have zeros, which take as long as the others' heads.
TEST(Layouts, OfHeadsThatDoNotDividePayForZeros) {
    ModelSizes model = model_of(1280, 8, 8);  // ten heads
    const Cluster cluster = cluster_of(8, 8);
    const auto of = [&](int64_t tensor) { return layout_of(model, cluster, {.tensor = tensor}); };
    // Three of ten heads on each of four, and a fourth of the MLP and of the tables.
    const int64_t heads = 8 * (model.block.of_queries + model.block.of_keys),
                  mlp = 8 * model.block.inner;
    EXPECT_NEAR(static_cast<double>(of(4).state_bytes),
                14 * (static_cast<double>(3 * heads) / 10 + static_cast<double>(mlp) / 4 +
                      2 * table_of(model) / 4 + 17 * 1280),
                14 * 4096 * 20);
    const double flops =
        4 * (2 * (0.3 * static_cast<double>(heads) + 0.25 * static_cast<double>(mlp)) +
             8 * 0.3 * model.attention_flops) +
        3 * 2 * table_of(model) / 4;
    EXPECT_NEAR(of(4).compute_seconds, 2048 * flops / 6e14, 1e-9);
    // Both are weighed; of two heads of keys no four ranks can share ten queries.
    std::vector<int64_t> tensors;
    for (const Layout& l : best_of(model, cluster, 100)) tensors.push_back(l.tensor);
    EXPECT_THAT(tensors, testing::Contains(8));
    EXPECT_THAT(tensors, testing::Contains(4));
    EXPECT_EQ(refusal_of_tensor(model, cluster, 8), "");
    model.kv_heads = 2;
    EXPECT_EQ(refusal_of_tensor(model, cluster, 2), "");
    EXPECT_THAT(refusal_of_tensor(model, cluster, 4),
                testing::HasSubstr("10 heads over 2 of keys"));
    EXPECT_THAT(refusal_of_tensor(model, cluster_of(16, 16), 16), testing::HasSubstr("10 heads"));
    EXPECT_THAT(refusal_of_tensor(model, cluster_of(12, 6), 4),
                testing::HasSubstr("span hosts of 6"));
    model.kv_heads = 10;
    model.has_patterns = true;
    EXPECT_THAT(refusal_of_tensor(model, cluster, 4), testing::HasSubstr("a pattern's"));
    EXPECT_EQ(refusal_of_tensor(model, cluster, 2), "");
}

// A group that the user has chosen may span hosts: its sums cross the network.
TEST(Layouts, OfChosenGroupsAcrossHostsPayForTheNetwork) {
    const ModelSizes model = model_of(4096, 8, 8);
    const Cluster inside = cluster_of(4, 4), apart = cluster_of(4, 2);
    const Layout of{.tensor = 4, .micro_batches = 8};
    const Layout quick = layout_of(model, inside, of), slow = layout_of(model, apart, of);
    EXPECT_EQ(quick.across_hosts_bytes, 0);
    EXPECT_DOUBLE_EQ(slow.across_hosts_bytes, slow.tensor_bytes * 2 / 3);
    EXPECT_GT(slow.exchange_seconds, 2 * quick.exchange_seconds);
    for (const Layout& l : best_of(model, apart, 100)) EXPECT_LE(l.tensor, 2);
    const std::vector<Layout> chosen = best_layouts(model, apart, 100, {.tensor = 4}).best;
    ASSERT_EQ(chosen.size(), 1U);
    EXPECT_EQ(chosen.front().tensor, 4);
}

// ---------------------------------------------------------------- stages

// Stages that are alike and a network that is not felt.
TEST(Layouts, HaveTheBubbleOfTheory) {
    ModelSizes model = model_of(8192, 32, 8);
    model.vocab = 1;
    Cluster cluster = cluster_of(4, 4);
    cluster.measured.comm_bytes_per_s = 1e18;
    cluster.measured.copy_bytes_per_s = 1e18;
    const auto bubble_of = [&](Order order, int64_t virtual_stages, int64_t groups) {
        const Layout l = layout_of(model, cluster,
                                   {.pipeline = 4,
                                    .order = order,
                                    .virtual_stages = virtual_stages,
                                    .micro_batches = 8,
                                    .groups = groups});
        expect_whole(l);
        return l.bubble_seconds / (l.compute_seconds + l.bubble_seconds);
    };
    EXPECT_NEAR(bubble_of(Order::one_f_one_b, 1, 8), 3.0 / 11, 1e-6);
    EXPECT_NEAR(bubble_of(Order::zero_bubble, 1, 8), 1.5 / 9.5, 1e-6);          // half
    EXPECT_NEAR(bubble_of(Order::interleaved, 4, 8), 3.0 / (8 * 4 + 3), 1e-6);  // a fourth
    EXPECT_NEAR(bubble_of(Order::round_robin, 8, 1), 3.0 / (8 * 8 + 3), 1e-6);  // of single blocks
    // Of a group's eight blocks all but the last see both micro-batches first.
    EXPECT_NEAR(bubble_of(Order::one_f_one_b, 1, 4), 3 * 15.0 / (64 + 3 * 15.0), 1e-6);
}

TEST(Layouts, GoRoundWithoutPausesFromAsManyMicroBatchesAsStages) {
    Passing of{.order = Order::round_robin, .stages = 4, .group_size = 4, .virtual_stages = 6};
    EXPECT_EQ(waiting_visits(of), 3);
    of.group_size = 2;  // the first stage waits twice, each of five times
    EXPECT_EQ(waiting_visits(of), 3 + 5 * 2);
    of.group_size = 40;
    EXPECT_EQ(waiting_visits(of), 3);
}

// With zero bubble a stage never waits longer, whatever the groups; and interleaved ones never do.
TEST(Layouts, WaitNoLongerThan1F1B) {
    for (const int64_t stages : {2, 3, 8, 64}) {
        for (const int64_t groups : {1, 2, 7, 64, 512}) {
            for (const int64_t size : {1, 2, 16}) {
                for (const int64_t blocks : {1, 2, 12}) {
                    Passing of{
                        .stages = stages, .groups = groups, .group_size = size, .blocks = blocks};
                    const double waits = waiting_visits(of);
                    of.order = Order::zero_bubble;
                    EXPECT_LE(waiting_visits(of), waits);
                    of = {.order = Order::interleaved,
                          .stages = stages,
                          .groups = groups,
                          .group_size = size,
                          .virtual_stages = blocks};
                    EXPECT_LE(waiting_visits(of), waits);
                }
            }
        }
    }
}

// As fast where memory is not asked for, and a layer's factors beside block inputs where it is.
TEST(Layouts, OfZeroBubbleAreFasterAndTakeFactors) {
    const ModelSizes model = model_of(4096, 32, 64);
    const Cluster cluster = cluster_of(8, 8);
    for (const int64_t groups : {1, 4, 16, 64}) {
        Layout of{.pipeline = 8, .micro_batches = 64, .groups = groups};
        const Layout plain = layout_of(model, cluster, of);
        of.order = Order::zero_bubble;
        const Layout split = layout_of(model, cluster, of);
        EXPECT_LE(split.seconds, plain.seconds) << groups;
        EXPECT_GT(split.device_bytes + split.host_bytes, plain.device_bytes + plain.host_bytes);
    }
    // Factors stay on the device.
    Cluster small = cluster;
    small.device_bytes = 20e9;
    const Layout away =
        layout_of(model, small,
                  {.pipeline = 8, .order = Order::zero_bubble, .micro_batches = 64, .groups = 64});
    EXPECT_GT(away.copied_bytes, 0);
    EXPECT_GT(away.device_bytes, 8 * 4 * 16 * 2048.0 * 4096 * 2);
    // The last stage: inputs of one group, factors of eight. A token's are four widths, queries
    // twice, keys and values once, the MLP's three.
    const Layout of{.pipeline = 8, .micro_batches = 64, .groups = 64};
    const double plain = layout_of(model, cluster, of).device_bytes;
    Layout zero = of;
    zero.order = Order::zero_bubble;
    const double block_and_group = 2048.0 * 4096 * 2;
    EXPECT_DOUBLE_EQ(layout_of(model, cluster, zero).device_bytes - plain,
                     4 * block_and_group * (1 + 8 * (4 + 2 + 2 + 8) - 8));
}

// Inputs of P groups, of P + (P - 1) / V, of all.
TEST(Layouts, KeepBlockInputsAsTheirOrderSays) {
    const ModelSizes model = model_of(4096, 32, 64);
    const Cluster cluster = cluster_of(4, 4);
    const auto device = [&](Order order, int64_t virtual_stages, int64_t groups) {
        return layout_of(model, cluster,
                         {.pipeline = 4,
                          .order = order,
                          .virtual_stages = virtual_stages,
                          .micro_batches = 64,
                          .groups = groups})
            .device_bytes;
    };
    const double input = 2048.0 * 4096 * 2, plain = device(Order::one_f_one_b, 1, 64);
    EXPECT_DOUBLE_EQ(device(Order::interleaved, 2, 64) - plain, 8 * 1.5 * input);
    EXPECT_DOUBLE_EQ(device(Order::interleaved, 8, 64) - plain, 8 * 3.0 / 8 * input);
    // A group of all micro-batches is on its way, too.
    EXPECT_DOUBLE_EQ(device(Order::round_robin, 8, 1) - plain, (8 * 60 + 2 * 63) * input);
}

// A further group moves the accumulators, and weights that stream; with round robin there is one.
TEST(Layouts, MoveWeightsOnceAGroup) {
    const ModelSizes model = model_of(8192, 32, 64);
    const Cluster cluster = cluster_of(8, 8);
    const auto copied = [&](Order order, int64_t virtual_stages, int64_t groups, bool stay) {
        return layout_of(model, cluster,
                         {.pipeline = 8,
                          .order = order,
                          .virtual_stages = virtual_stages,
                          .micro_batches = 64,
                          .groups = groups,
                          .state = StateOn::host,
                          .weights_stay = stay})
            .copied_bytes;
    };
    const double blocks = 4.0 * (12 * 8192.0 * 8192 + 2 * 8192),
                 elements = blocks + table_of(model) + 8192;
    const Order plain = Order::one_f_one_b;
    EXPECT_DOUBLE_EQ(copied(plain, 1, 1, true), elements * (2 + 2));
    EXPECT_DOUBLE_EQ(copied(plain, 1, 16, true), elements * (2 + 2 + 15 * 8));
    EXPECT_DOUBLE_EQ(copied(plain, 1, 16, false),
                     elements * (2 + 16 * 2 + 15 * 8) + blocks * 16 * 2);
    EXPECT_DOUBLE_EQ(copied(Order::round_robin, 4, 1, false), elements * (2 + 2) + blocks * 2);
}

// Each group gathers the stage's weights forward, and its blocks' back.
TEST(Layouts, OfStage3InAPipelineGatherForEachGroup) {
    const ModelSizes model = model_of(4096, 8, 64);
    const Cluster cluster = cluster_of(8, 8);
    const double blocks = 2 * (12 * 4096.0 * 4096 + 2 * 4096),
                 all = blocks + table_of(model) + 8192;
    for (const int64_t groups : {1, 4, 32}) {
        const Layout l = layout_of(
            model, cluster,
            {.pipeline = 4, .replicas = 2, .zero_stage = 3, .micro_batches = 32, .groups = groups});
        const auto visits = static_cast<double>(groups);
        EXPECT_DOUBLE_EQ(l.zero_bytes, 0.5 * 2 * (visits * (all + blocks) + all));
    }
    // Each has half of the weights, and all of a block's while it is there.
    const auto device = [&](int64_t stage) {
        return layout_of(model, cluster,
                         {.pipeline = 4, .replicas = 2, .zero_stage = stage, .micro_batches = 32})
            .device_bytes;
    };
    EXPECT_DOUBLE_EQ(device(1) - device(3), all);
}

// ---------------------------------------------------------------- sequences

// Tokens, block inputs and products of a part; and of queries, keys, values and output what the
// others have the heads of, three times.
TEST(Layouts, OfSharedSequencesHaveAPartOfTheTokens) {
    ModelSizes model = model_of(4096, 8, 8);
    model.sequence = 32'768;
    const Cluster cluster = cluster_of(8, 8);
    const Layout one = layout_of(model, cluster, {.micro_batches = 8});
    const Layout four = layout_of(model, cluster, {.sequence = 4, .micro_batches = 8});
    EXPECT_DOUBLE_EQ(four.compute_seconds, one.compute_seconds / 4);
    EXPECT_DOUBLE_EQ(four.sequence_bytes, 8 * 8 * 3 * 3 * 8192.0 * (4096 * 4 / 4) * 2);
    // State is shared as among replicas.
    EXPECT_NEAR(static_cast<double>(four.state_bytes), static_cast<double>(one.state_bytes) / 4,
                1e-3 * static_cast<double>(four.state_bytes));
    // Where there are more ranks than sequences they are what is left.
    model.sequences = 1;
    model.sequence = 131'072;
    const std::vector<Layout> best = best_of(model, cluster_of(64, 8), 4);
    ASSERT_FALSE(best.empty());
    EXPECT_GT(best.front().sequence, 1);
    // Parts of any length are weighed: none that is chosen is faster than the best.
    const ModelSizes of_short = model_of(4096, 8, 64);
    const double free = best_of(of_short, cluster, 1).front().seconds;
    for (const int64_t sequence : {1, 2, 4, 8})
        EXPECT_GE(best_layouts(of_short, cluster, 1, {.sequence = sequence}).best.front().seconds,
                  free);
}

// ---------------------------------------------------------------- the search

// Where the network is slow block inputs alone cross it: a stage lies inside a host.
TEST(Layouts, OfASlowNetworkPassBlockInputs) {
    const ModelSizes model = model_of(5120, 40, 512);
    Cluster cluster = cluster_of(64, 8);
    const std::vector<Layout> fast = best_of(model, cluster, 4);
    cluster.network_bytes_per_s = 1e8;
    const std::vector<Layout> slow = best_of(model, cluster, 4);
    ASSERT_EQ(fast.size(), 4U);
    ASSERT_EQ(slow.size(), 4U);
    EXPECT_LE(slow.front().tensor * slow.front().replicas, 8);
    EXPECT_EQ(slow.front().across_hosts_bytes, slow.front().pipeline_bytes);
    EXPECT_GT(slow.front().seconds, fast.front().seconds);
    // With the network of a host the same ranks need no pipeline.
    EXPECT_EQ(best_of(model, cluster_of(8, 8), 1).front().pipeline, 1);
    for (const auto& layouts : {fast, slow}) {
        for (const Layout& l : layouts) {
            EXPECT_EQ(l.tensor * l.sequence * l.pipeline * l.replicas, 64);
            EXPECT_EQ(l.micro_batch * l.micro_batches * l.replicas, 512);
            EXPECT_EQ(8 % l.tensor, 0);  // inside a host
            EXPECT_LE(l.device_bytes, cluster.device_bytes);
            EXPECT_GE(l.seconds, layouts.front().seconds);
            expect_whole(l);
        }
    }
}

// What the user has chosen is in all of them, and costs no less than what the search would choose.
TEST(Layouts, KeepWhatIsChosen) {
    const ModelSizes model = model_of(5120, 40, 512);
    const Cluster cluster = cluster_of(64, 8);
    const double best = best_of(model, cluster, 1).front().seconds;
    const auto expect = [&](const FixedLayout& fixed, const auto& holds) {
        const std::vector<Layout> found = best_layouts(model, cluster, 100, fixed).best;
        ASSERT_FALSE(found.empty());
        EXPECT_GE(found.front().seconds, best);
        for (const Layout& l : found) EXPECT_TRUE(holds(l));
    };
    expect({.tensor = 4}, [](const Layout& l) { return l.tensor == 4; });
    expect({.sequence = 1}, [](const Layout& l) { return l.sequence == 1; });
    expect({.pipeline = 1}, [](const Layout& l) { return l.pipeline == 1; });
    expect({.pipeline = 8}, [](const Layout& l) { return l.pipeline == 8; });
    for (const int64_t stage : {0, 1, 2, 3})
        expect({.tensor = 8, .zero_stage = stage},
               [&](const Layout& l) { return l.zero_stage == stage; });
    expect({.pipeline = 8, .virtual_stages = 5}, [](const Layout& l) {
        return l.virtual_stages == 5 &&
               (l.order == Order::interleaved || l.order == Order::round_robin);
    });
    const std::array one{Order::one_f_one_b};
    expect({.pipeline = 8, .orders = one},
           [](const Layout& l) { return l.order == Order::one_f_one_b; });
    EXPECT_TRUE(best_layouts(model, cluster, 1, {.tensor = 3}).best.empty());
}

// At stage 0 everybody updates everything, in host memory: sums come back instead of weights. Stage
// 2 is what stage 1 is.
TEST(Layouts, OfStage0SendSumsBackAndKeepAll) {
    const ModelSizes model = model_of(4096, 8, 64);
    const Cluster cluster = cluster_of(8, 8);
    const auto of = [&](int64_t stage) {
        return layout_of(
            model, cluster,
            {.replicas = 8, .zero_stage = stage, .micro_batches = 8, .state = StateOn::host});
    };
    EXPECT_NEAR(of(0).zero_bytes, of(1).zero_bytes, 1e-9 * of(1).zero_bytes);  // both in 16 bits
    EXPECT_EQ(of(0).state_bytes, 8 * of(1).state_bytes);
    EXPECT_GT(of(0).seconds, of(1).seconds);
    EXPECT_EQ(of(2).seconds, of(1).seconds);
    EXPECT_EQ(of(2).device_bytes, of(1).device_bytes);
    for (const Layout& l : best_layouts(model, cluster, 100, {.zero_stage = 0}).best)
        EXPECT_TRUE(l.replicas * l.sequence == 1 || l.state != StateOn::device);
    // The search weighs it: where updates cost nothing and gradients are narrower than weights.
    ModelSizes narrow = model;
    narrow.element.weight = 4;
    Cluster idle = cluster;
    idle.device_bytes = 3e10;
    idle.measured.dram_bytes_per_s = 1e18;
    idle.measured.copy_bytes_per_s = 1e18;
    idle.measured.comm_bytes_per_s = 1e9;
    const FixedLayout whole{.tensor = 1, .sequence = 1, .pipeline = 1};
    EXPECT_EQ(best_layouts(narrow, idle, 1, whole).best.front().zero_stage, 0);
    EXPECT_FALSE(best_layouts(narrow, idle, 1, whole).set_aside);
}

// Equal bytes, that backward alone hides: stage 0 keeps eight times the state, and so stands aside
// though it seems faster. Where it is chosen it is kept.
TEST(Layouts, OfStage0WinByNoLessThanTheArithmeticErrs) {
    const ModelSizes model = model_of(4096, 8, 64);
    Cluster cluster = cluster_of(8, 8);
    cluster.device_bytes = 2e10;
    cluster.measured.dram_bytes_per_s = 1e18;
    cluster.measured.copy_bytes_per_s = 1e18;
    FixedLayout fixed{.tensor = 1, .sequence = 1, .pipeline = 1};
    // Gradients and weights of 1.1 times a forward's time.
    const Layout base = layout_of(model, cluster, {.replicas = 8, .micro_batches = 8});
    cluster.measured.comm_bytes_per_s = base.zero_bytes / 2 / (1.1 * base.compute_seconds / 4);
    fixed.zero_stage = 0;
    const Layout of_0 = best_layouts(model, cluster, 1, fixed).best.front();
    fixed.zero_stage = 1;
    const Layout of_1 = best_layouts(model, cluster, 1, fixed).best.front();
    ASSERT_LT(of_0.seconds, of_1.seconds);
    ASSERT_GT(kArithmeticErrs * of_0.seconds, of_1.seconds);
    fixed.zero_stage.reset();
    const FoundLayouts found = best_layouts(model, cluster, 1, fixed);
    EXPECT_NE(found.best.front().zero_stage, 0);
    ASSERT_TRUE(found.set_aside);
    EXPECT_EQ(found.set_aside->zero_stage, 0);
    EXPECT_EQ(found.set_aside->seconds, of_0.seconds);
}

// What is said of several stages is no choice of one.
TEST(Layouts, OfChosenVirtualStagesHaveStages) {
    const ModelSizes model = model_of(5120, 40, 512);
    const Cluster cluster = cluster_of(64, 8);
    for (const Layout& l : best_layouts(model, cluster, 100, {.virtual_stages = 5}).best) {
        EXPECT_GT(l.pipeline, 1);
        EXPECT_EQ(l.virtual_stages, 5);
    }
    EXPECT_EQ(best_layouts(model, cluster, 1, {.virtual_stages = 7}).weighed, 0);
    EXPECT_TRUE(best_layouts(model, cluster, 1, {.pipeline = 1, .virtual_stages = 7}).weighed > 0);
    // No replicas of ten thousand ranks divide so many sequences.
    EXPECT_EQ(best_layouts(model_of(25'600, 128, 3'072), cluster_of(10'000, 8), 1).weighed, 0);
}

TEST(Layouts, SayWhereMoreWasNotTried) {
    EXPECT_TRUE(at_bound({.micro_batch = 16, .micro_batches = 4}).sequences);
    EXPECT_FALSE(at_bound({.micro_batch = 16, .micro_batches = 1}).sequences);
    EXPECT_FALSE(at_bound({.micro_batch = 8, .micro_batches = 8}).sequences);
    EXPECT_TRUE(at_bound({.micro_batch = 13, .micro_batches = 2}).sequences);  // 26 is all
    const auto group = [](int64_t micro_batches, int64_t groups) {
        return at_bound({.pipeline = 4, .micro_batches = micro_batches, .groups = groups}).group;
    };
    EXPECT_TRUE(group(256, 4));
    EXPECT_FALSE(group(256, 8));
    EXPECT_FALSE(group(256, 1));
    EXPECT_FALSE(group(128, 2));  // the next one is all of them
    EXPECT_FALSE(at_bound({.micro_batches = 256}).group);
}

// What does not fit a device goes to its host, and further where that is small.
TEST(Layouts, GoToTheTierThatHasRoom) {
    const ModelSizes model = model_of(4096, 64, 64);  // 13 B: 180 GB of state and gradients
    Cluster cluster = cluster_of(1, 1);
    cluster.network_bytes_per_s = 0;
    EXPECT_EQ(best_of(model, cluster, 1).front().state, StateOn::host);
    cluster.host_bytes = 1e11;
    EXPECT_TRUE(best_of(model, cluster, 1).empty());
    cluster.nvme_bytes = kInfinite;
    const Layout stored = best_of(model, cluster, 1).front();
    EXPECT_EQ(stored.state, StateOn::nvme);
    EXPECT_GT(stored.update_seconds, 0);  // the drive binds
    cluster = cluster_of(8, 8);
    EXPECT_EQ(best_of(model, cluster, 1).front().state, StateOn::device);
}

// Stored state is read and written once a step. Its gradients go to the drive where the host has no
// room for them.
TEST(Layouts, StoreStateAndTheGradientsThatTheHostHasNoRoomFor) {
    ModelSizes model = model_of(4096, 8, 8);
    Cluster cluster = cluster_of(2, 2);
    cluster.nvme_bytes = kInfinite;
    const Layout of{.replicas = 2, .micro_batches = 4, .state = StateOn::nvme};
    const Layout roomy = layout_of(model, cluster, of);
    const double elements = static_cast<double>(roomy.state_bytes) / 14;
    EXPECT_DOUBLE_EQ(roomy.stored_bytes, 2 * 12 * elements);
    EXPECT_DOUBLE_EQ(roomy.nvme_bytes, 12 * elements);
    EXPECT_DOUBLE_EQ(roomy.host_bytes, 2 * elements);
    cluster.host_bytes = 2 * roomy.host_bytes - 1;  // of two ranks
    const Layout narrow = layout_of(model, cluster, of);
    EXPECT_DOUBLE_EQ(narrow.stored_bytes, 2 * 14 * elements);
    EXPECT_DOUBLE_EQ(narrow.nvme_bytes, 14 * elements);
    EXPECT_EQ(narrow.host_bytes, 0);
    // A weight that the state holds half of is read from the device before its update.
    model.element.split = true;
    EXPECT_DOUBLE_EQ(layout_of(model, cluster, of).copied_bytes - narrow.copied_bytes,
                     2 * elements);
}

// A tied table is read on both sides of the blocks, all other weights of edges once.
TEST(Layouts, ReadATiedTableTwice) {
    ModelSizes model = model_of(4096, 8, 8);
    const auto copied = [&](int64_t groups) {
        return layout_of(model, cluster_of(1, 1),
                         {.micro_batches = 8,
                          .groups = groups,
                          .state = StateOn::host,
                          .weights_stay = false})
            .copied_bytes;
    };
    const double accumulators = 2 * 4, blocks = 8 * (12 * 4096.0 * 4096 + 2 * 4096);
    EXPECT_DOUBLE_EQ(copied(2) - copied(1),
                     2 * (2 * blocks + 2 * table_of(model) + 4096) +
                         accumulators * (blocks + 2 * table_of(model) + 4096));
    model.tied = true;
    EXPECT_DOUBLE_EQ(copied(2) - copied(1), 2 * (2 * blocks + 2 * table_of(model) + 4096) +
                                                accumulators * (blocks + table_of(model) + 4096));
}

// Where a stage's weights have no room on its device they come as often as the order asks.
TEST(Layouts, GoRoundWhereWeightsStream) {
    const ModelSizes model = model_of(8192, 80, 32);
    Cluster cluster = cluster_of(8, 1);
    cluster.device_bytes = 20e9;
    cluster.network_bytes_per_s = 2e9;
    const std::vector<Layout> found = best_of(model, cluster, 1);
    ASSERT_FALSE(found.empty());
    const Layout& best = found.front();
    EXPECT_FALSE(best.weights_stay);
    EXPECT_EQ(best.order, Order::round_robin);
    const std::array others{Order::one_f_one_b, Order::zero_bubble, Order::interleaved};
    const std::vector<Layout> without = best_layouts(model, cluster, 1, {.orders = others}).best;
    ASSERT_FALSE(without.empty());
    EXPECT_GT(without.front().seconds, best.seconds);
    EXPECT_NE(without.front().order, Order::round_robin);
}

// More ranks in any way take no more memory of state each; a faster network or rank no more time.
TEST(Layouts, AreMonotonic) {
    const ModelSizes model = model_of(4096, 32, 256);
    const Cluster cluster = cluster_of(64, 8);
    const Layout of{.tensor = 2, .pipeline = 4, .replicas = 4, .micro_batches = 64, .groups = 8};
    const Layout base = layout_of(model, cluster, of);
    for (int64_t Layout::*field : {&Layout::tensor, &Layout::pipeline, &Layout::replicas}) {
        Layout more = of;
        more.*field *= 2;
        if (field == &Layout::replicas) more.micro_batches /= 2, more.groups /= 2;
        const Layout found = layout_of(model, cluster, more);
        EXPECT_LT(found.state_bytes, base.state_bytes);
        EXPECT_LE(found.device_bytes, base.device_bytes);
        EXPECT_LT(found.compute_seconds, base.compute_seconds);
    }
    for (double factor : {2.0, 8.0}) {
        Cluster faster = cluster;
        faster.network_bytes_per_s *= factor;
        EXPECT_LE(layout_of(model, faster, of).seconds, base.seconds);
        faster.measured.assumed_flops_per_s *= factor;
        EXPECT_LT(layout_of(model, faster, of).seconds, base.seconds);
        EXPECT_EQ(layout_of(model, faster, of).sent_bytes(), base.sent_bytes());
    }
}

// No layout takes less than its products on all ranks, or its bytes over their links.
TEST(Layouts, TakeNoLessThanTheirBounds) {
    const ModelSizes model = model_of(5120, 40, 512);
    for (const double network : {1e8, 1.25e9, 5e10}) {
        Cluster cluster = cluster_of(64, 8);
        cluster.network_bytes_per_s = network;
        for (const Layout& l : best_of(model, cluster, 1000)) {
            EXPECT_GE(l.seconds, products_of(model) / (64 * 6e14));
            EXPECT_GE(l.seconds, l.across_hosts_bytes / network);
            EXPECT_GE(l.seconds, l.in_host_bytes() / 3e11);
            EXPECT_GE(l.seconds, l.copied_bytes / 2 / 5e10);
            EXPECT_GT(l.compute_seconds, 0);
            expect_whole(l);
        }
    }
}

// A trillion parameters on ten thousand ranks. A layout takes about 0.2 us.
TEST(Layouts, OfATrillionParametersAreFoundInFewSteps) {
    const ModelSizes model = model_of(25'600, 128, 3'200);
    const Cluster cluster = cluster_of(9'600, 8);
    const FoundLayouts found = best_layouts(model, cluster, 4);
    ASSERT_EQ(found.best.size(), 4U);
    EXPECT_LT(found.weighed, 2'000'000);
    const Layout& best = found.best.front();
    EXPECT_GT(best.tensor * best.pipeline, 1);
    EXPECT_GT(best.seconds, products_of(model) / (9'600 * 6e14));
}

}  // namespace
}  // namespace ferry::cost
