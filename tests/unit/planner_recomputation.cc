// How many blocks save which activations for backward, in how many groups, and what that takes.
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <limits>
#include <set>

#include "planner/chunks.h"
#include "planner/placing/place.h"
#include "planner/placing/step_seconds.h"
#include "planner/planner.h"

namespace ferry::planner {
namespace {

using model::Saved;

constexpr int64_t kBlocks = 8, kInput = 32768, kAttention = 33000, kSaved = 36864;  // whole pages
constexpr int64_t kMlp = 3 * kSaved;

std::vector<model::Layer> eight_blocks() {
    std::vector<model::Layer> layers;
    const auto add = [&](model::LayerKind kind, int64_t index, int64_t elements) {
        layers.push_back({.kind = kind,
                          .index = index,
                          .segments = {{0, elements, true, true}},
                          .elements = elements,
                          .trainable_elements = elements});
        if (kind == model::LayerKind::block)
            layers.back().tensors = {
                {.role = model::Role::up, .shape = {elements, 1}, .count = elements}};
    };
    add(model::LayerKind::embedding, 0, 65536);
    for (int64_t i = 0; i < kBlocks; ++i) add(model::LayerKind::block, i, 131072);
    add(model::LayerKind::head, 0, 65536);
    return layers;
}

void freeze(model::Layer& layer) {
    layer.segments[0].trainable = false;
    layer.trainable_elements = 0;
    for (model::Tensor& tensor : layer.tensors) tensor.trainable = false;
}

class Recomputation : public testing::Test {
protected:
    Recomputation() {
        request_.device = DeviceKind::cuda;
        request_.micro_batches = 4;
        request_.swap.chunk_elements = 16384;
        request_.clips = true;
        machine_ = cost::default_measurements(request_.device);
    }
    Plan plan() const { return make_plan(request_, layers_, numerics_, needs_, measured()); }
    Plan plan_saving(int64_t attention, int64_t mlp = 0) {
        request_.swap.save_attention = attention;
        request_.swap.save_mlp = mlp;
        const Plan made = plan();
        request_.swap.save_attention = request_.swap.save_mlp = std::nullopt;
        return made;
    }
    static std::vector<int64_t> blocks_saving(const Plan& plan, Saved what = Saved::attention) {
        std::vector<int64_t> blocks;
        for (size_t l = 0; l < plan.layers.size(); ++l) {
            if (plan.layer_plans[l].saves[at(what)]) blocks.push_back(plan.layers[l].index);
        }
        EXPECT_EQ(std::ssize(blocks), plan.blocks_saving(what));
        return blocks;
    }
    static int64_t attention_saved(const Plan& plan) {
        return plan.blocks_saving(Saved::attention);
    }
    static int64_t inputs_on_device(const Plan& plan) {
        return std::ranges::count(plan.inputs, swap::kNoObject);
    }
    // Everything on the device but what is to be left over.
    void leave(int64_t bytes) {
        request_.budgets.device_bytes = kUnlimited;
        request_.budgets.device_bytes = plan_saving(0).device_bytes + bytes;
    }

    // As placements are compared; infinite where so many do not fit.
    StepSeconds seconds_saving(int64_t attention, int64_t mlp = 0, int64_t groups = 1,
                               int64_t inputs = kBlocks) const {
        constexpr double kNever = std::numeric_limits<double>::infinity();
        std::vector<LayerPlan> plans(layers_.size());
        const zero::Partition alone;
        const std::vector<Chunk> chunks =
            cut_chunks(layers_, request_.swap.chunk_elements.value(), {}, alone, plans);
        const std::vector<AccumulatorSpill> spills =
            cut_spills(layers_, request_.swap.chunk_elements.value(), plans);
        const Workload work{
            .layers = layers_,
            .numerics = numerics_,
            .needs = needs_,
            .partition = alone,
            .chunk_elements = request_.swap.chunk_elements.value(),
            .cut_elements = request_.swap.chunk_elements.value(),
            .report_bytes = Plan{.micro_batches = 4, .layers = layers_}.report_bytes()};
        std::vector<SavedActivation> last;
        for (int64_t i = 0; i < attention; ++i)
            last.push_back({static_cast<size_t>(kBlocks - i), Saved::attention});
        for (int64_t i = 0; i < mlp; ++i)
            last.push_back({static_cast<size_t>(kBlocks - i), Saved::mlp});
        PlanRequest request = request_;
        request.swap.groups = groups;
        const Placement placement =
            place(request, work, chunks, spills, measured(), {inputs, last});
        const int64_t saved = std::ranges::count(placement.saved[0], true) +
                              std::ranges::count(placement.saved[1], true);
        if (saved < attention + mlp) return {kNever, kNever};
        return step_seconds(request, work, chunks, spills, placement, measured());
    }

    PlanRequest request_{};
    std::vector<model::Layer> layers_ = eight_blocks();
    const model::Numerics numerics_{.sequence = 64, .micro_batch = 1};
    DeviceNeeds needs_{
        .activation = kInput,
        .scratch = 1 << 20,
        .saved = {kAttention, 0},
        .saved_flops = {std::vector<double>(kBlocks, 1e6), std::vector<double>(kBlocks, 1e6)}};
    // Times of a step's kernels, where they were timed.
    struct Machine : cost::Measurements {
        double forward_s = 0, backward_s = 0;
        Machine& operator=(const cost::Measurements& measured) {
            static_cast<cost::Measurements&>(*this) = measured;
            forward_s = backward_s = 0;
            return *this;
        }
    } machine_{};
    cost::Measurements measured() const {
        cost::Measurements found = machine_;
        const auto take = [&](cost::Op op, double seconds) {
            if (seconds <= 0) return;
            constexpr auto kBlock = static_cast<int64_t>(model::LayerKind::block);
            found.kernels.seconds[{static_cast<int64_t>(op), kBlock, 0}] =
                seconds / static_cast<double>(request_.micro_batches * kBlocks);
        };
        take(cost::Op::forward, machine_.forward_s);
        take(cost::Op::backward, machine_.backward_s);
        return found;
    }
};

TEST_F(Recomputation, CountsWhatIsSavedToTheByte) {
    for (const int64_t groups : {1, 2, 4}) {
        request_.swap.groups = groups;
        const int64_t without = plan_saving(0).device_bytes;
        for (const int64_t blocks : {1, 3, 8, 99}) {
            const Plan plan = plan_saving(blocks);
            const int64_t count = std::min(blocks, kBlocks) * 4 / groups;
            const Buffers& buffers = plan.buffers[at(Class::attention)];
            EXPECT_EQ(buffers.bytes, kSaved);
            EXPECT_EQ(buffers.count, count);
            EXPECT_EQ(plan.device_bytes, without + count * kSaved);
            const auto row =
                std::ranges::find(plan.rows, "attention saved for backward", &TierRow::what);
            ASSERT_NE(row, plan.rows.end());
            EXPECT_EQ(row->bytes, count * kSaved);
        }
    }
}

TEST_F(Recomputation, TheLastBlocksSaveIt) {
    EXPECT_EQ(blocks_saving(plan_saving(3)), (std::vector<int64_t>{5, 6, 7}));
    needs_.saved_flops[at(Saved::attention)] = {9, 1, 9, 1, 1, 1, 1, 1};  // windows
    EXPECT_EQ(blocks_saving(plan_saving(3)), (std::vector<int64_t>{0, 2, 7}));
}

// Blocks below all that trains recompute nothing.
TEST_F(Recomputation, OnlyBlocksThatBackwardVisitsSaveIt) {
    for (size_t l = 0; l < 4; ++l) freeze(layers_[l]);
    EXPECT_EQ(blocks_saving(plan_saving(99)), (std::vector<int64_t>{3, 4, 5, 6, 7}));
    EXPECT_EQ(plan().blocks_at_most(), 5);
    freeze(layers_[4]);
    EXPECT_EQ(blocks_saving(plan_saving(99)), (std::vector<int64_t>{4, 5, 6, 7}));
}

TEST_F(Recomputation, WhatIsAskedForIsSavedOrRefusedWithTheBudgetThatWorks) {
    request_.swap.save_attention = 5;
    request_.budgets.device_bytes = 1;
    int64_t smallest = 0;
    try {
        plan();
        FAIL();
    } catch (const Error& error) {
        EXPECT_EQ(error.trouble(), Trouble::does_not_fit);
        EXPECT_NE(error.problem().remedy.find("swap.save_attention"), std::string::npos);
        const std::string& text = error.problem().measured;
        smallest = std::stoll(text.substr(text.find('(') + 1));
    }
    request_.budgets.device_bytes = smallest;
    EXPECT_EQ(attention_saved(plan()), 5);
    EXPECT_EQ(plan().device_bytes, smallest);
    EXPECT_EQ(plan().groups, 4);  // fewer micro-batches at a time save less
    --request_.budgets.device_bytes;
    EXPECT_THROW(plan(), Error);
}

TEST_F(Recomputation, NothingIsSavedWhereNobodySaidWhatIsToSpare) {
    machine_.kernels.saved_s[at(Saved::attention)] = 1;
    EXPECT_EQ(attention_saved(plan()), 0);
    leave(kGiB);
    EXPECT_EQ(attention_saved(plan()), kBlocks);
}

// Asked for, block inputs come first.
TEST_F(Recomputation, KeepsNothingInPlaceOfABlockInputThatShallStay) {
    request_.swap.save_inputs = kBlocks;
    machine_.kernels.saved_s[at(Saved::attention)] = 1;
    leave(0);
    const int64_t all = request_.budgets.device_bytes;
    int64_t spilled = 0, partly = 0;
    for (const int64_t groups : {1, 2, 4}) {
        request_.swap.groups = groups;
        const int64_t inputs = 4 / groups * kBlocks;
        for (int64_t budget = all; budget > 3 * kMiB; budget -= 100 * kKiB) {
            request_.budgets.device_bytes = budget;
            try {
                const Plan made = plan();
                EXPECT_EQ(inputs_on_device(made), inputs_on_device(plan_saving(0)));
                EXPECT_LE(made.device_bytes, budget);
                spilled += inputs_on_device(made) < inputs;
                partly += attention_saved(made) > 0 && attention_saved(made) < kBlocks;
                if (inputs_on_device(made) < inputs) {
                    EXPECT_EQ(attention_saved(made), 0);
                }
            } catch (const Error& error) {
                EXPECT_EQ(error.trouble(), Trouble::does_not_fit);
            }
        }
    }
    EXPECT_GT(spilled, 0);
    EXPECT_GT(partly, 0);
}

// Long attention is dearer than the traffic of the state that would be in its place, short cheaper.
TEST_F(Recomputation, LongSequencesSaveAttentionAndShortOnesHoldState) {
    const auto state_on_device = [](const Plan& plan) {
        return std::ranges::count_if(
            plan.chunks, [&](const Chunk& chunk) { return plan.updates_on_device(chunk); });
    };
    request_.swap.groups = 1;
    request_.swap.save_inputs = kBlocks;
    leave(0);
    request_.budgets.device_bytes -= 2 * kMiB;
    machine_.forward_s = 1e-3;
    machine_.backward_s = 3e-3;
    machine_.kernels.saved_s[at(Saved::attention)] = 4e-5;  // 1.3 ms of a step
    const Plan lengthy = plan();
    EXPECT_EQ(attention_saved(lengthy), kBlocks);
    machine_.dram_bytes_per_s = 1e9;  // then updates bind, whatever is computed
    const Plan slow_host = plan();
    EXPECT_EQ(attention_saved(slow_host), 0);
    EXPECT_GT(state_on_device(slow_host), state_on_device(lengthy));
    machine_ = cost::default_measurements(request_.device);
    machine_.kernels.saved_s[at(Saved::attention)] = 1e-9;
    machine_.forward_s = machine_.backward_s = 1e-6;
    EXPECT_EQ(attention_saved(plan()), 0);
    EXPECT_EQ(state_on_device(plan()), state_on_device(plan_saving(0)));
}

// No other count makes the step shorter, but where a run whose speculative updates are rolled back
// would pay for it.
TEST_F(Recomputation, TheCountIsTheBestOfAll) {
    request_.swap.groups = 1;
    request_.swap.save_inputs = kBlocks;
    std::set<int64_t> counts;
    for (const DeviceKind device : {DeviceKind::cpu, DeviceKind::cuda}) {
        request_.device = device;
        request_.swap.state_on_device = 1;
        leave(0);
        const int64_t all = request_.budgets.device_bytes;
        for (const int64_t missing : {0, 2, 4, 8, 12}) {
            request_.budgets.device_bytes = all - missing * kMiB;
            for (double attention_s = 1e-8; attention_s < 1e-3; attention_s *= 3) {
                machine_ = cost::default_measurements(request_.device);
                machine_.kernels.saved_s[at(Saved::attention)] = attention_s;
                machine_.forward_s = 5e-4;
                machine_.backward_s = 1e-3 + 32 * attention_s;
                const Plan made = plan();
                SCOPED_TRACE(testing::Message()
                             << name_of(device) << ", " << missing << " MiB missing, "
                             << attention_s << " s: " << attention_saved(made));
                const StepSeconds chosen = seconds_saving(attention_saved(made));
                std::vector<StepSeconds> all_ways;
                for (int64_t other = 0; other <= kBlocks; ++other)
                    all_ways.push_back(seconds_saving(other));
                const double least =
                    std::ranges::min(all_ways, {}, &StepSeconds::not_speculative).not_speculative;
                EXPECT_LE(chosen.not_speculative, least * 1.01);
                for (const StepSeconds& other : all_ways) {
                    if (other.not_speculative > least * 1.01) continue;
                    EXPECT_LE(chosen.expected(request_), other.expected(request_) * (1 + 1e-12));
                }
                request_.swap.speculate = Speculate::all;
                const double all_committed = seconds_saving(attention_saved(plan())).committed;
                for (int64_t other = 0; other <= kBlocks; ++other)
                    EXPECT_LE(all_committed, seconds_saving(other).committed * (1 + 1e-12))
                        << other;
                request_.swap.speculate = Speculate::automatic;
                counts.insert(attention_saved(made));
            }
        }
    }
    EXPECT_GE(counts.size(), 4u);
}

// The expected share of clipped steps decides how much longer a step without speculation may take.
TEST_F(Recomputation, WhatIsSaidOfClippingWeighsStepsWithAndWithoutSpeculation) {
    request_.swap.groups = 1;
    request_.swap.save_inputs = kBlocks;
    request_.swap.state_on_device = 1;
    leave(0);
    request_.budgets.device_bytes -= 14 * kMiB;
    request_.budgets.host_bytes = kGiB;  // in memory alone speculative updates have room
    const double update_s = 131072 * 32 / machine_.dram_bytes_per_s;
    machine_.update_overhead_s = 0;
    machine_.forward_s = kBlocks * update_s * 0.6;
    machine_.backward_s = 3 * machine_.forward_s;
    machine_.kernels.saved_s[at(Saved::attention)] = update_s * 0.002;
    std::vector<int64_t> counts;
    for (const double clipped : {0.0, 0.25, 0.5, 1.0}) {
        request_.swap.expect_clipped = clipped;
        const int64_t made = attention_saved(plan());
        const double chosen = seconds_saving(made).expected(request_);
        for (int64_t other = 0; other <= kBlocks; ++other) {
            const StepSeconds seconds = seconds_saving(other);
            EXPECT_LE(chosen, seconds.expected(request_) * (1 + 1e-12)) << other << ", " << clipped;
            EXPECT_DOUBLE_EQ(seconds.expected(request_),
                             (1 - clipped) * seconds.committed + clipped * seconds.not_speculative);
        }
        counts.push_back(made);
    }
    EXPECT_TRUE(std::ranges::is_sorted(counts, std::greater()));
    EXPECT_GT(counts.front(), counts.back());
    request_.swap.expect_clipped = std::nullopt;
    request_.clips = false;  // then none is
    EXPECT_EQ(attention_saved(plan()), counts.front());
    request_.swap.speculate = Speculate::off;
    request_.swap.expect_clipped = 0;  // of speculative updates that are not made
    EXPECT_EQ(attention_saved(plan()), counts.back());
}

// Forward waits for a layer whose update has not ended. Speculative ones have begun during
// backward, but for the first layers', whose gradients come last.
TEST_F(Recomputation, ForwardWaitsForUpdatesThatAreLate) {
    request_.swap.groups = 1;
    request_.swap.speculate = Speculate::all;
    request_.swap.state_on_device = 0;
    machine_.update_overhead_s = 0;
    machine_.copy_bytes_per_s = 1e13;
    const auto check = [&](double block_s) {
        const double ends_s = block_s / 2;
        const auto waits = [&] {
            const StepSeconds found = seconds_saving(0);
            const double kernels_s = machine_.forward_s + machine_.backward_s;
            return StepSeconds{found.committed - kernels_s, found.not_speculative - kernels_s};
        };
        const double near_s = 1e-9 * kBlocks * block_s;
        machine_.backward_s = 100 * kBlocks * block_s;
        machine_.forward_s = kBlocks * block_s * 2;  // hides what is left but for the first layers'
        EXPECT_NEAR(waits().not_speculative, ends_s + block_s, near_s);
        EXPECT_NEAR(waits().committed, ends_s + block_s, near_s);
        machine_.forward_s = kBlocks * block_s / 4;
        EXPECT_NEAR(waits().not_speculative, 2 * ends_s + kBlocks * block_s * 3 / 4, near_s);
        EXPECT_NEAR(waits().committed, ends_s + block_s, near_s);
        machine_.backward_s = kBlocks * block_s / 2;  // speculative updates end late, too
        machine_.forward_s = kBlocks * block_s * 2;
        EXPECT_NEAR(waits().committed, 2 * ends_s + kBlocks * block_s / 2, near_s);
    };
    check(131072 * 32 / machine_.dram_bytes_per_s);
    // State on a drive is updated no sooner than it has been read and is written.
    request_.budgets.nvme = {{.path = "/nvme"}};
    request_.swap.state_on_nvme = 1;
    machine_.nvme_bytes_per_s = machine_.dram_bytes_per_s / 4;
    check(2 * 131072 * 12 / machine_.nvme_bytes_per_s);
}

// Activations that save most for their bytes come first; those asked for are saved in any case.
TEST_F(Recomputation, ActivationsAreSavedByWhatTheirBytesSpare) {
    needs_.saved[at(Saved::mlp)] = kMlp;
    leave(0);
    request_.budgets.device_bytes -= (4 * kBlocks - 2) * kInput;  // no state, no weights
    const int64_t nothing = plan_saving(0).device_bytes;
    request_.swap.groups = 1;
    request_.swap.state_on_device = 0;
    request_.budgets.device_bytes = 2 * nothing + 4 * (kMlp + kSaved);
    machine_.forward_s = machine_.backward_s = 1;  // compute binds
    for (const bool mlp_first : {false, true}) {
        machine_.kernels.saved_s[at(Saved::attention)] = 1e-3;
        machine_.kernels.saved_s[at(Saved::mlp)] = mlp_first ? 4e-3 : 2e-3;
        const Plan made = plan();
        SCOPED_TRACE(testing::Message() << attention_saved(made) << " attention, "
                                        << made.blocks_saving(Saved::mlp) << " MLPs");
        const int64_t more = mlp_first ? made.blocks_saving(Saved::mlp) : attention_saved(made);
        const int64_t less = mlp_first ? attention_saved(made) : made.blocks_saving(Saved::mlp);
        EXPECT_GT(more, 0);
        EXPECT_TRUE(less == 0 || more == kBlocks);
    }
    request_.swap.save_mlp = 2;
    EXPECT_EQ(blocks_saving(plan(), Saved::mlp), (std::vector<int64_t>{6, 7}));
}

// Beside a GPU, inputs make room for results where their way to the host and back is the shorter.
TEST_F(Recomputation, InputsLeaveWhereCopiesHaveTimeForThem) {
    needs_.saved[at(Saved::mlp)] = kMlp;
    request_.swap.groups = 1;
    request_.swap.state_on_device = 0;
    request_.swap.speculate = Speculate::off;
    leave(0);
    request_.budgets.device_bytes -= kBlocks * 131072 * 4;  // no weights
    std::set<int64_t> counts;
    for (const double copy_bytes_per_s : {1e8, 1e9, 4e9, 1e12}) {
        SCOPED_TRACE(copy_bytes_per_s);
        machine_ = cost::default_measurements(request_.device);
        machine_.copy_bytes_per_s = copy_bytes_per_s;
        machine_.dram_bytes_per_s = 1e13;
        machine_.forward_s = 1e-3;
        machine_.backward_s = 4e-3;
        machine_.kernels.saved_s = {2e-5, 6e-5};
        const auto seconds_of = [&](const Plan& made) {
            return seconds_saving(attention_saved(made), made.blocks_saving(Saved::mlp), 1,
                                  made.blocks_saving_inputs())
                .expected(request_);
        };
        const Plan made = plan();
        counts.insert(made.blocks_saving_inputs());
        for (int64_t blocks = 0; blocks <= kBlocks; ++blocks) {
            request_.swap.save_inputs = blocks;
            const Plan other = plan();
            EXPECT_EQ(inputs_on_device(other), 4 * other.blocks_saving_inputs());
            EXPECT_LE(other.blocks_saving_inputs(), blocks);
            EXPECT_LE(seconds_of(made), seconds_of(other) * 1.0201) << blocks;
        }
        request_.swap.save_inputs = std::nullopt;
        machine_.computes_on_host = true;
        EXPECT_EQ(inputs_on_device(plan()), 4 * kBlocks);
    }
    EXPECT_GE(counts.size(), 2u);
    EXPECT_TRUE(counts.contains(kBlocks));
}

// A refusal names the least that works in any number of groups.
TEST_F(Recomputation, MoreGroupsAreTriedWhereTheFewestDoNotFit) {
    const auto smallest = [this](int64_t BudgetConfig::*budget,
                                 std::optional<int64_t> groups) -> int64_t {
        request_.swap.groups = groups;
        request_.budgets.*budget = 1;
        try {
            plan();
        } catch (const Error& error) {
            const std::string& text = error.problem().measured;
            return std::stoll(text.substr(text.find('(') + 1));
        }
        ADD_FAILURE() << "it fits";
        return 0;
    };
    request_.swap.save_inputs = 0;
    request_.swap.state_on_device = 0;
    request_.budgets.device_bytes = smallest(&BudgetConfig::device_bytes, 1);
    const int64_t one = smallest(&BudgetConfig::host_bytes, 1);
    const int64_t four = smallest(&BudgetConfig::host_bytes, 4);
    const int64_t any = smallest(&BudgetConfig::host_bytes, std::nullopt);
    EXPECT_NE(one, four);
    EXPECT_LE(any, std::min(one, four));
    request_.budgets.host_bytes = any;
    EXPECT_LE(plan().host_bytes, any);
    --request_.budgets.host_bytes;
    EXPECT_THROW(plan(), Error);
    // The same of NVMe, where whatever is too much for the host goes.
    request_.budgets.host_bytes = any / 2;
    request_.budgets.nvme = {{.path = "/nvme"}};
    int64_t least = kUnlimited, most = 0;
    for (const int64_t groups : {1, 2, 4}) {
        request_.swap.groups = groups;
        least = std::min(least, plan().nvme_bytes);
        most = std::max(most, plan().nvme_bytes);
    }
    ASSERT_LT(least, most);
    request_.swap.groups = std::nullopt;
    request_.budgets.nvme[0].size_bytes = least;
    EXPECT_LE(plan().nvme_bytes, least);
}

// In more groups a block saves less at a time, so that more blocks save it, and weights travel
// more often: worth it where kernels bind.
TEST_F(Recomputation, GroupsAreAsManyAsMakeTheStepShortest) {
    request_.swap.save_inputs = kBlocks;
    needs_.saved[at(Saved::mlp)] = kMlp;
    request_.swap.state_on_device = 0;
    std::set<int64_t> groups;
    leave(0);
    const int64_t all = request_.budgets.device_bytes;
    for (const double copy_bytes_per_s : {1e8, 1e10, 1e12}) {
        for (const int64_t missing : {0, 1, 2, 3}) {
            request_.budgets.device_bytes = all - missing * kMiB;
            machine_ = cost::default_measurements(request_.device);
            machine_.copy_bytes_per_s = copy_bytes_per_s;
            machine_.dram_bytes_per_s = 1e13;
            machine_.forward_s = 1e-3;
            machine_.backward_s = 4e-3;
            machine_.kernels.saved_s = {2e-5, 6e-5};
            const Plan made = plan();
            const int64_t attention = attention_saved(made), mlp = made.blocks_saving(Saved::mlp);
            SCOPED_TRACE(testing::Message() << copy_bytes_per_s << " B/s, " << missing
                                            << " MiB missing: " << made.groups << " groups, "
                                            << attention << ", " << mlp);
            const double chosen = seconds_saving(attention, mlp, made.groups).expected(request_);
            for (const int64_t other : {1, 2, 4})
                EXPECT_LE(chosen * 0.98, seconds_saving(attention, mlp, other).expected(request_));
            // Nor do steps without speculative updates pay more than their hundredth for it.
            EXPECT_LE(seconds_saving(attention, mlp, made.groups).not_speculative,
                      seconds_saving(0, 0, 1).not_speculative * 1.01 * 1.02);
            groups.insert(made.groups);
            request_.swap.groups = 2;
            EXPECT_EQ(plan().groups, 2);
            request_.swap.groups = std::nullopt;
        }
    }
    EXPECT_GE(groups.size(), 2u);
}

}  // namespace
}  // namespace ferry::planner
