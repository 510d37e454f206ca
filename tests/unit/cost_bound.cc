#include <gtest/gtest.h>

#include <limits>
#include <string>
#include <vector>

#include "cost/bound.h"

namespace ferry::cost {
namespace {

constexpr double kInfinite = std::numeric_limits<double>::infinity();

BoundInput billion() {
    return {.kernel_seconds = 0.1,
            .parameters = 1e9,
            .element = {.wire = 2, .weight = 2},
            .weights = {.bytes = 2e9, .frozen_bytes = 0, .read_bytes = 4e9},
            .device_bytes = 0,
            .host_bytes = kInfinite,
            .nvme_bytes = kInfinite,
            .measured = {.copy_bytes_per_s = 50e9,
                         .nvme_bytes_per_s = 4e9,
                         .dram_bytes_per_s = 160e9,
                         .device_bytes_per_s = 2.8e12,
                         .computes_on_host = false}};
}

TEST(LowerBound, WithAmpleHostMemoryDramBinds) {
    const Bound bound = lower_bound(billion());
    EXPECT_EQ(bound.binding, Link::dram);
    EXPECT_NEAR(bound.seconds, (28.0 + 4 + 2) / 160,
                1e-9);  // update, weights up twice, gradients down
    EXPECT_EQ(bound.state_in_host, 1);
}

TEST(LowerBound, ComputeBindsWhenItIsSlowest) {
    BoundInput input = billion();
    input.kernel_seconds = 3;
    EXPECT_EQ(lower_bound(input).binding, Link::compute);
    EXPECT_EQ(lower_bound(input).seconds, 3);
}

TEST(LowerBound, TheRanksBindWhereTheirLinkIsSlowest) {
    BoundInput input = billion();
    input.comm.among_all = 3e9;
    input.measured.comm_bytes_per_s = 200e9;
    EXPECT_EQ(lower_bound(input).binding, Link::dram);
    input.measured.comm_bytes_per_s = 2e9;
    EXPECT_EQ(lower_bound(input).binding, Link::comm);
    EXPECT_EQ(lower_bound(input).seconds, 1.5);
    input.measured.comm_bytes_per_s = 0;  // not known: as copies do
    input.comm.among_all = 300e9;
    EXPECT_EQ(lower_bound(input).seconds, 6);
}

TEST(LowerBound, RanksOfAHostExchangeBesideWhatCrossesTheNetwork) {
    BoundInput input = billion();
    input.measured.comm_bytes_per_s = 1e9;
    input.measured.across_hosts = {2e9, 0};
    input.measured.in_host = {4e9, 0};
    input.comm = {.among_all = 3e9, .in_host = 12e9, .across_hosts = 4e9};
    EXPECT_EQ(lower_bound(input).binding, Link::comm);
    EXPECT_DOUBLE_EQ(lower_bound(input).seconds, 5);
    input.comm.in_host = 28e9;
    EXPECT_DOUBLE_EQ(lower_bound(input).seconds, 7);
}

TEST(LowerBound, WhatTheHostCannotHoldGoesToNvmeAndBack) {
    BoundInput input = billion();
    input.host_bytes = 2e9;  // the weights; no state
    const Bound bound = lower_bound(input);
    EXPECT_EQ(bound.binding, Link::nvme);
    EXPECT_NEAR(bound.seconds, (24.0 + 4) / 4, 1e-9);  // and the gradients that wait with it
    EXPECT_EQ(bound.weights_on_nvme, 0);
    input.host_bytes = 9e9;  // half of both
    EXPECT_NEAR(lower_bound(input).seconds, 14.0 / 4, 1e-9);
}

TEST(LowerBound, WeightsOnTheDeviceTravelOnceAndStateThereNeedsNoCopies) {
    BoundInput input = billion();
    input.measured.copy_bytes_per_s = 5e9;
    EXPECT_EQ(lower_bound(input).binding, Link::host_to_device);
    EXPECT_NEAR(lower_bound(input).seconds, 4.0 / 5, 1e-9);
    input.device_bytes = 2e9;  // the weights: gradients go down, and updated weights come back
    Bound bound = lower_bound(input);
    EXPECT_NEAR(bound.seconds, 2.0 / 5, 1e-9);
    EXPECT_EQ(bound.weights_on_device, 1);
    EXPECT_EQ(bound.state_on_device, 0);
    input.device_bytes = 16e9;  // state and gradients too
    bound = lower_bound(input);
    // All but what the host updates while the kernels run, which leaves more time to compute.
    EXPECT_GT(bound.state_on_device, 0.7);
    EXPECT_EQ(bound.binding, Link::compute);
    EXPECT_NEAR(bound.seconds, 0.1 + bound.state_on_device * 28 / 2800, 1e-9);
}

// A device whose memory is DRAM saves the copies, not the update.
TEST(LowerBound, StateOnADeviceMadeOfDramIsUpdatedThroughIt) {
    BoundInput input = billion();
    input.device_bytes = kInfinite;
    input.measured.computes_on_host = true;
    input.measured.device_bytes_per_s = input.measured.dram_bytes_per_s;
    input.kernel_seconds = 0;
    EXPECT_EQ(lower_bound(input).seconds, 28.0 / 160);
}

// Half of the device memory that a whole model needs takes half of the update from DRAM.
TEST(LowerBound, PartOfTheStateOnTheDeviceLeavesTheRestToTheHost) {
    BoundInput input = billion();
    input.device_bytes = 8e9;
    const Bound bound = lower_bound(input);
    EXPECT_EQ(bound.state_on_device, 0.5);
    EXPECT_EQ(bound.binding, Link::dram);
    EXPECT_NEAR(bound.seconds, (28.0 + 4 + 2) / 2 / 160, 1e-9);
}

// Where every rank keeps all weights it writes those that it updates: others bring theirs.
TEST(LowerBound, OtherRanksUpdatesAreNotThisOnes) {
    BoundInput input = billion();
    input.host_bytes = 0;
    EXPECT_NEAR(lower_bound(input).seconds, (2 * 14 + 4 + 2) / 4.0, 1e-9);
    input.parameters = 1e9 / 8;
    EXPECT_NEAR(lower_bound(input).seconds, (2 * 14 / 8.0 + 4 + 2 / 8.0) / 4, 1e-9);
}

// A split master's update reads the weights too, wherever they are.
TEST(LowerBound, ASplitMasterMovesLessStateAndItsWeights) {
    BoundInput input = billion();
    input.element.state = 10;
    input.element.split = true;
    EXPECT_NEAR(lower_bound(input).seconds, (20.0 + 6 + 4 + 2) / 160, 1e-9);
    input.host_bytes = 2e9;  // the weights; no state
    EXPECT_NEAR(lower_bound(input).seconds, 24.0 / 4, 1e-9);
    input.host_bytes = 0;  // the weights on NVMe: read three times, written once
    EXPECT_NEAR(lower_bound(input).seconds, (24.0 + 3 * 2 + 2) / 4, 1e-9);
    input.host_bytes = kInfinite;
    input.device_bytes = 2e9;
    input.measured.copy_bytes_per_s = 5e9;
    // With g of the weights on the device and, in what they leave, s = (1 - g) / 6 of the state, 4
    // - 2g - 2s go up and 2 + 2g - 4s come down: g = 7/13 is the best.
    EXPECT_NEAR(lower_bound(input).seconds, 36.0 / 13 / 5, 1e-5) << "between points of the grid";
}

// Nothing is recomputed that the device memory beside the best placement can keep.
TEST(LowerBound, ActivationsAreSavedInTheDeviceMemoryThatIsLeft) {
    BoundInput input = billion();
    input.kernel_seconds = 1;
    double& attention = input.saving[at(model::Saved::attention)].seconds;
    attention = 0.2;
    input.saving[at(model::Saved::attention)].bytes = 4e9;
    EXPECT_EQ(lower_bound(input).seconds, 1);
    input.device_bytes = 1e9;
    Bound bound = lower_bound(input);
    EXPECT_EQ(bound.binding, Link::compute);
    EXPECT_DOUBLE_EQ(bound.seconds, 0.95);
    EXPECT_EQ(bound.saved, (model::OfSaved<double>{0.25, 0}));
    input.device_bytes = kInfinite;
    EXPECT_DOUBLE_EQ(lower_bound(input).seconds, 0.8);
    // First what saves more for its bytes.
    input.saving[at(model::Saved::mlp)] = {.seconds = 0.1, .bytes = 1e9};
    input.device_bytes = 2e9;
    bound = lower_bound(input);
    EXPECT_EQ(bound.saved, (model::OfSaved<double>{0.25, 1}));
    EXPECT_DOUBLE_EQ(bound.seconds, 1 - 0.1 - 0.05);
    input.device_bytes = kInfinite;
    EXPECT_DOUBLE_EQ(lower_bound(input).seconds, 0.7);
    input.saving[at(model::Saved::mlp)] = {};
    // Where the host's memory binds, the same bytes are the state's.
    input.kernel_seconds = 0.1;
    attention = 0.02;
    input.device_bytes = 8e9;
    bound = lower_bound(input);
    EXPECT_EQ(bound.binding, Link::dram);
    EXPECT_EQ(bound.state_on_device, 0.5);
    EXPECT_EQ(bound.saved, model::OfSaved<double>{});
}

// For results in their place, as far as copies have time; where they do not fit in any case.
TEST(LowerBound, InputsLeaveTheDeviceWhereThatIsShorter) {
    BoundInput input = billion();
    input.kernel_seconds = 1;
    input.saving[at(model::Saved::mlp)] = {.seconds = 0.4, .bytes = 4e9};
    input.device_bytes = input.input_bytes = 8e9;
    Bound bound = lower_bound(input);
    EXPECT_EQ(bound.binding, Link::compute);
    EXPECT_NEAR(bound.seconds, 0.6, 1e-9);
    EXPECT_NEAR(bound.saved[at(model::Saved::mlp)], 1, 1e-9);
    // Weights go up twice, 4 GB, and as much of the inputs as takes the kernels' time: 0.5 s and
    // their part, of which twice is saved.
    input.measured.copy_bytes_per_s = 8e9;
    bound = lower_bound(input);
    EXPECT_NEAR(bound.saved[at(model::Saved::mlp)], 2 * 0.5 / 1.8, 1e-4);
    EXPECT_NEAR(bound.seconds, 1 - 0.4 * 2 * 0.5 / 1.8, 1e-4);
    // No memory for inputs: both ways, whatever it takes.
    input.device_bytes = 0;
    input.measured.copy_bytes_per_s = 2e9;
    EXPECT_NEAR(lower_bound(input).seconds, (4.0 + 8) / 2, 1e-9);
    // On the host they take the place of state, which is stored instead; else they are.
    input.measured.copy_bytes_per_s = 50e9;
    input.measured.nvme_bytes_per_s = 1e9;
    input.host_bytes = 2e9 + 14e9;
    EXPECT_NEAR(lower_bound(input).seconds, 2 * 8, 1e-9);
    input.host_bytes = 2e9;
    EXPECT_NEAR(lower_bound(input).seconds, 2 * 14 + 2 * 8, 1e-9);
    input.groups = 2;
    EXPECT_NEAR(lower_bound(input).seconds, 2 * 14 + 2 * 2 * 8, 1e-9);
}

TEST(LowerBound, AFurtherGroupVisitsTheWeightsOnceMore) {
    BoundInput input = billion();
    input.accumulator_bytes = 4e9;
    for (const double groups : {1, 2, 4}) {
        input.groups = groups;
        input.measured.copy_bytes_per_s = 1e9;
        EXPECT_NEAR(lower_bound(input).seconds, 4 * groups + 4 * (groups - 1), 1e-9);
    }
    EXPECT_EQ(lower_bound(input, 20).seconds, 20);  // not below that
}

TEST(LowerBound, FrozenWeightsTravelToo) {
    BoundInput input = billion();
    input.weights = {.bytes = 6e9, .frozen_bytes = 4e9, .read_bytes = 12e9};
    EXPECT_NEAR(lower_bound(input).seconds, (28.0 + 12 + 2) / 160, 1e-9);
    // Weights that the host cannot hold are read from NVMe at each visit and never written.
    input.host_bytes = 18e9;  // state, gradients and two thirds of the weights
    input.nvme_bytes = 4e9;
    input.measured.nvme_bytes_per_s = 1e9;
    const Bound bound = lower_bound(input);
    EXPECT_EQ(bound.binding, Link::nvme);
    EXPECT_NEAR(bound.seconds, 4, 1e-9);  // twice the 2 GB that do not fit, of whatever
}

TEST(WeightTraffic, CountsALayerAtEachVisit) {
    const model::Shape shape{.hidden = 8,
                             .layers = 2,
                             .heads = 1,
                             .kv_heads = 1,
                             .head_dim = 8,
                             .intermediate = 16,
                             .vocab = 100,
                             .tie_embeddings = false};
    const auto traffic = [&](const std::vector<std::string>& freeze, int64_t tokens) {
        return weight_traffic(model::layers_of(shape, freeze, false), shape, tokens, DType::bf16);
    };
    const auto bytes_of = [&](const std::vector<std::string>& freeze, size_t layer) {
        return 2.0 * double(model::layers_of(shape, freeze, false)[layer].elements);
    };
    const double rows = 8 * 2;
    EXPECT_EQ(traffic({}, 10).frozen_bytes, 0);
    EXPECT_EQ(traffic({}, 10).read_bytes, 10 * rows + 4 * bytes_of({}, 1) + bytes_of({}, 3));
    EXPECT_EQ(traffic({}, 1000).read_bytes, 100 * rows + 4 * bytes_of({}, 1) + bytes_of({}, 3));
    // Only the head trains: no block is visited in the backward pass.
    const std::vector<std::string> below{"model.embed*", "model.layers.*"};
    EXPECT_EQ(traffic(below, 10).read_bytes,
              10 * rows + 2 * bytes_of(below, 1) + bytes_of(below, 3));
    EXPECT_EQ(traffic(below, 10).frozen_bytes, bytes_of(below, 0) + 2 * bytes_of(below, 1));
}

TEST(LowerBound, IsInfiniteWhenNothingIsAdmissible) {
    BoundInput input = billion();
    input.host_bytes = input.nvme_bytes = 1e9;
    EXPECT_EQ(lower_bound(input).seconds, kInfinite);
}

TEST(LowerBound, CountsTheStateThatTheOptimizerKeeps) {
    BoundInput input = billion();
    const double adam = lower_bound(input).seconds;
    input.element.state = 4;  // sgd without momentum: p alone
    EXPECT_NEAR(adam - lower_bound(input).seconds, 16.0 / 160, 1e-9);
}

model::Shape small_llama() {
    return {.hidden = 8,
            .layers = 2,
            .heads = 2,
            .kv_heads = 1,
            .head_dim = 4,
            .intermediate = 20,
            .vocab = 30};
}

double flops_of(const model::Shape& shape, const std::vector<std::string>& freeze) {
    return model_flops(model::layers_of(shape, freeze, false), shape, 16, 32);
}

// 8 x 8 + 2 x 4 x 8 + 8 x 8 of attention and 3 x 8 x 20 of the MLP, twice, and the head.
constexpr double kBlock = 64 + 64 + 64 + 480, kHead = 240;

TEST(ModelFlops, AreSixAnElementAndTokenAndThoseOfAttention) {
    const double attention = 6 * 16 * 8;  // 6 s d a token and block
    EXPECT_EQ(flops_of(small_llama(), {}), 32 * (6 * (2 * kBlock + kHead) + 2 * attention));
    model::Shape tied = small_llama();
    tied.tie_embeddings = true;
    EXPECT_EQ(flops_of(tied, {}), flops_of(small_llama(), {}));
    model::Shape sliding = small_llama();
    sliding.windows = {0, 4};  // of 4 keys, 3.5 on average
    EXPECT_EQ(flops_of(sliding, {}), 32 * (6 * (2 * kBlock + kHead) + attention + 12 * 3.5 * 8));
}

TEST(ModelFlops, OfWhatDoesNotTrainAreFewer) {
    const std::vector<std::string> all{"*"}, below{"model.embed_tokens.*", "model.layers.0.*"};
    EXPECT_EQ(flops_of(small_llama(), all), 32 * (2 * (2 * kBlock + kHead) + 2 * 4 * 8 * 8));
    // Nothing passes back through the first block.
    EXPECT_EQ(flops_of(small_llama(), below),
              32 * (2 * kBlock + 4 * 8 * 8 + 6 * (kBlock + kHead) + 12 * 8 * 8));
    // Of the last block the second half alone trains: its attention has no gradient.
    const std::vector<std::string> half{"model.embed*", "model.layers.0.*", "*self_attn*",
                                        "*layernorm*"};
    constexpr double kMlp = 480, kDown = 160;
    EXPECT_EQ(flops_of(small_llama(), half),
              32 * (2 * 2 * kBlock + 2 * 4 * 8 * 8 + 2 * (kMlp + kDown) + 6 * kHead));
    // The head's input has no gradient that anything asks for.
    const std::vector<std::string> head{"model.*"};
    EXPECT_EQ(flops_of(small_llama(), head), 32 * (2 * 2 * kBlock + 2 * 4 * 8 * 8 + 4 * kHead));
}

}  // namespace
}  // namespace ferry::cost
