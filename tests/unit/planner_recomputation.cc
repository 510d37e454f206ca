// How many blocks keep what their attention gives, and what that takes.
#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <set>

#include "ferry/planner.h"
#include "src/planner/chunks.h"
#include "src/planner/placement.h"
#include "src/planner/step_seconds.h"

namespace ferry::planner {
namespace {

constexpr int64_t kBlocks = 8, kInput = 32768, kAttention = 33000, kKept = 36864;  // whole pages

std::vector<model::Layer> eight_blocks() {
    std::vector<model::Layer> layers;
    const auto add = [&](model::LayerKind kind, int64_t index, int64_t elements) {
        layers.push_back({.kind = kind,
                          .index = index,
                          .segments = {{0, elements, true, true}},
                          .elements = elements,
                          .trainable_elements = elements});
    };
    add(model::LayerKind::embedding, 0, 65536);
    for (int64_t i = 0; i < kBlocks; ++i) add(model::LayerKind::block, i, 131072);
    add(model::LayerKind::head, 0, 65536);
    return layers;
}

void freeze(model::Layer& layer) {
    layer.segments[0].trainable = false;
    layer.trainable_elements = 0;
}

class Recomputation : public testing::Test {
protected:
    Recomputation() {
        config_.device = "cuda";
        config_.batch = {.sequence = 64, .micro_batch = 1, .micro_batches = 4};
        config_.swap.chunk_elements = 16384;
        machine_ = default_figures(config_);
    }
    Plan plan() const { return make_plan(config_, layers_, numerics_, needs_, {}, machine_); }
    Plan keeping(int64_t blocks) {
        config_.swap.keep_attention = blocks;
        const Plan made = plan();
        config_.swap.keep_attention = -1;
        return made;
    }
    static std::vector<int64_t> kept(const Plan& plan) {
        std::vector<int64_t> blocks;
        for (size_t l = 0; l < plan.layers.size(); ++l) {
            if (plan.layer_plans[l].keeps_attention) blocks.push_back(plan.layers[l].index);
        }
        EXPECT_EQ(std::ssize(blocks), plan.attention_kept());
        return blocks;
    }
    static int64_t inputs_on_device(const Plan& plan) {
        return std::ranges::count(plan.inputs, swap::kNoObject);
    }
    // Everything on the device but what is to be left over.
    void leave(int64_t bytes) {
        config_.budgets.device_bytes = kUnlimited;
        config_.budgets.device_bytes = keeping(0).device_bytes + bytes;
    }

    // As placements are compared; infinite where so many do not fit.
    double seconds_keeping(int64_t blocks) const {
        std::vector<LayerPlan> plans(layers_.size());
        const zero::Partition alone;
        const std::vector<Chunk> chunks =
            cut_chunks(layers_, config_.swap.chunk_elements, alone, plans);
        const Workload work{
            .layers = layers_,
            .numerics = numerics_,
            .needs = needs_,
            .partition = alone,
            .chunk_elements = config_.swap.chunk_elements,
            .report_bytes = Plan{.micro_batches = 4, .layers = layers_}.report_bytes()};
        std::vector<size_t> last;
        for (int64_t i = 0; i < blocks; ++i) last.push_back(static_cast<size_t>(kBlocks - i));
        const Placement placement = place(config_, work, chunks, {}, machine_, last);
        return std::ranges::count(placement.attention, true) < blocks
                   ? std::numeric_limits<double>::infinity()
                   : step_seconds(config_, work, chunks, {}, placement, machine_);
    }

    Config config_{};
    std::vector<model::Layer> layers_ = eight_blocks();
    const model::Numerics numerics_{.sequence = 64, .micro_batch = 1};
    DeviceNeeds needs_{.activation = kInput,
                       .scratch = 1 << 20,
                       .attention = kAttention,
                       .attention_flops = std::vector<double>(kBlocks, 1e6)};
    MachineFigures machine_{};
};

TEST_F(Recomputation, CountsWhatIsKeptToTheByte) {
    for (const int64_t groups : {1, 2, 4}) {
        config_.swap.groups = groups;
        const int64_t without = keeping(0).device_bytes;
        for (const int64_t blocks : {1, 3, 8, 99}) {
            const Plan plan = keeping(blocks);
            const int64_t count = std::min(blocks, kBlocks) * 4 / groups;
            const Buffers& buffers = plan.buffers[at(Class::attention)];
            EXPECT_EQ(buffers.bytes, kKept);
            EXPECT_EQ(buffers.count, count);
            EXPECT_EQ(plan.device_bytes, without + count * kKept);
            const auto row =
                std::ranges::find(plan.rows, "attention kept for backward", &TierRow::what);
            ASSERT_NE(row, plan.rows.end());
            EXPECT_EQ(row->bytes, count * kKept);
        }
    }
}

TEST_F(Recomputation, TheLastBlocksKeepIt) {
    EXPECT_EQ(kept(keeping(3)), (std::vector<int64_t>{5, 6, 7}));
    needs_.attention_flops = {9, 1, 9, 1, 1, 1, 1, 1};  // windows
    EXPECT_EQ(kept(keeping(3)), (std::vector<int64_t>{0, 2, 7}));
}

// Of blocks below all that trains nothing is computed again.
TEST_F(Recomputation, OnlyBlocksThatBackwardVisitsKeepIt) {
    for (size_t l = 0; l < 4; ++l) freeze(layers_[l]);
    EXPECT_EQ(kept(keeping(99)), (std::vector<int64_t>{3, 4, 5, 6, 7}));
    EXPECT_EQ(plan().attention_at_most(), 5);
    freeze(layers_[4]);
    EXPECT_EQ(kept(keeping(99)), (std::vector<int64_t>{4, 5, 6, 7}));
}

TEST_F(Recomputation, WhatIsAskedForIsKeptOrRefusedWithTheBudgetThatWorks) {
    config_.swap.keep_attention = 5;
    config_.budgets.device_bytes = 1;
    int64_t smallest = 0;
    try {
        plan();
        FAIL();
    } catch (const Error& error) {
        EXPECT_EQ(error.trouble(), Trouble::does_not_fit);
        EXPECT_NE(error.problem().remedy.find("swap.keep_attention"), std::string::npos);
        const std::string& text = error.problem().measured;
        smallest = std::stoll(text.substr(text.find('(') + 1));
    }
    config_.budgets.device_bytes = smallest;
    EXPECT_EQ(plan().attention_kept(), 5);
    EXPECT_EQ(plan().device_bytes, smallest);
    EXPECT_EQ(plan().groups, 4);  // fewer micro-batches at a time keep less
    --config_.budgets.device_bytes;
    EXPECT_THROW(plan(), Error);
}

TEST_F(Recomputation, NothingIsKeptWhereNobodySaidWhatIsToSpare) {
    machine_.attention_s = 1;
    EXPECT_EQ(plan().attention_kept(), 0);
    leave(kGiB);
    EXPECT_EQ(plan().attention_kept(), kBlocks);
}

// Block inputs come first: to recompute anything they must be there.
TEST_F(Recomputation, KeepsNothingInPlaceOfABlockInput) {
    machine_.attention_s = 1;
    leave(0);
    const int64_t all = config_.budgets.device_bytes, inputs = inputs_on_device(keeping(0));
    EXPECT_EQ(inputs, 4 * kBlocks);
    int64_t spilled = 0, partly = 0;
    for (int64_t budget = all; budget > 3 * kMiB; budget -= 100 * kKiB) {
        config_.budgets.device_bytes = budget;
        try {
            const Plan made = plan();
            EXPECT_EQ(inputs_on_device(made), inputs_on_device(keeping(0)));
            EXPECT_LE(made.device_bytes, budget);
            spilled += inputs_on_device(made) < inputs;
            partly += made.attention_kept() > 0 && made.attention_kept() < kBlocks;
            if (inputs_on_device(made) < inputs) {
                EXPECT_EQ(made.attention_kept(), 0);
            }
        } catch (const Error& error) {
            EXPECT_EQ(error.trouble(), Trouble::does_not_fit);
        }
    }
    EXPECT_GT(spilled, 0);
    EXPECT_GT(partly, 0);
}

// Long attention is dearer than the traffic of the state that would be in its place, short cheaper.
TEST_F(Recomputation, LongSequencesKeepAttentionAndShortOnesState) {
    const auto state_on_device = [](const Plan& plan) {
        return std::ranges::count_if(
            plan.chunks, [&](const Chunk& chunk) { return plan.updates_on_device(chunk); });
    };
    leave(0);
    config_.budgets.device_bytes -= 2 * kMiB;
    machine_.forward_s = 1e-3;
    machine_.backward_s = 3e-3;
    machine_.attention_s = 4e-5;  // 1.3 ms of a step
    const Plan lengthy = plan();
    EXPECT_EQ(lengthy.attention_kept(), kBlocks);
    machine_.dram_bytes_per_s = 1e9;  // then updates bind, whatever is computed
    const Plan slow_host = plan();
    EXPECT_EQ(slow_host.attention_kept(), 0);
    EXPECT_GT(state_on_device(slow_host), state_on_device(lengthy));
    machine_ = default_figures(config_);
    machine_.attention_s = 1e-9;
    machine_.forward_s = machine_.backward_s = 1e-6;
    EXPECT_EQ(plan().attention_kept(), 0);
    EXPECT_EQ(state_on_device(plan()), state_on_device(keeping(0)));
}

// No other count makes the step shorter.
TEST_F(Recomputation, TheCountIsTheBestOfAll) {
    std::set<int64_t> counts;
    for (const char* device : {"cpu", "cuda"}) {
        config_.device = device;
        config_.swap.state_on_device = 1;
        leave(0);
        const int64_t all = config_.budgets.device_bytes;
        for (const int64_t missing : {0, 2, 4, 8, 12}) {
            config_.budgets.device_bytes = all - missing * kMiB;
            for (double attention_s = 1e-8; attention_s < 1e-3; attention_s *= 3) {
                machine_ = default_figures(config_);
                machine_.attention_s = attention_s;
                machine_.forward_s = 5e-4;
                machine_.backward_s = 1e-3 + 32 * attention_s;
                const Plan made = plan();
                SCOPED_TRACE(testing::Message() << device << ", " << missing << " MiB missing, "
                                                << attention_s << " s: " << made.attention_kept());
                const double chosen = seconds_keeping(made.attention_kept());
                for (int64_t other = 0; other <= kBlocks; ++other)
                    EXPECT_LE(chosen, seconds_keeping(other) * (1 + 1e-12)) << other;
                counts.insert(made.attention_kept());
            }
        }
    }
    EXPECT_GE(counts.size(), 4u);
}

}  // namespace
}  // namespace ferry::planner
