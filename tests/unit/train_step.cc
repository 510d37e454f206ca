// The order in which a step asks for copies.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>

#include "planner/recording/recorder.h"
#include "planner/work.h"
#include "train/step/step.h"

namespace ferry::train {
namespace {

constexpr int64_t kBlocks = 4, kMicroBatches = 2;

planner::Plan plan_of(const SwapConfig& swap) {
    const model::Shape shape{.hidden = 64,
                             .layers = kBlocks,
                             .heads = 2,
                             .kv_heads = 1,
                             .head_dim = 32,
                             .intermediate = 128,
                             .vocab = 64};
    planner::PlanRequest request;
    request.micro_batches = kMicroBatches;
    request.swap = swap;
    return planner::make_plan(
        request, model::layers_of(shape, {}, false), {.sequence = 64, .micro_batch = 1},
        {.activation = 16384, .scratch = 1 << 20}, cost::default_measurements(request.device));
}

// All weights on the device, state and block inputs in host memory.
planner::Plan inputs_away() {
    return plan_of({.speculate = Speculate::all, .state_on_device = 0, .save_inputs = 0});
}

// Copies of a lane go one after another: behind one that waits for an update, none begins.
TEST(Step, AnInputComesBackBeforeTheWeightsOfTheBlockAboveAreUpdated) {
    const planner::Plan plan = inputs_away();
    const swap::Schedule step = record_step(plan, Previous::committed, true);
    std::vector<swap::ObjectId> up;
    for (const swap::Task& task : step.tasks) {
        if (task.lane == swap::Lane::h2d) up.push_back(task.object);
    }
    const auto turn = [&](swap::ObjectId object) {
        const auto found = std::ranges::find(up, object);
        EXPECT_NE(found, up.end());
        return found - up.begin();
    };
    for (int64_t block = 0; block < kBlocks; ++block) {
        const auto first = static_cast<size_t>(block * kMicroBatches);
        for (const planner::Chunk& chunk : plan.chunks_of(block + 2))  // of the layer above
            EXPECT_LT(turn(plan.inputs[first]), turn(chunk.weight)) << block;
        EXPECT_LT(turn(plan.inputs[first]), turn(plan.inputs[first + 1]));
    }
}

// Of everything that trains, once; a task says how much it is of.
TEST(Step, TheDeviceRoundsAndUpdatesRunsOfChunks) {
    const planner::Plan plan = plan_of({.chunk_elements = 4096, .state_on_device = 1});
    const swap::Schedule step = record_step(plan, Previous::not_speculative, false);
    std::array<int64_t, 2> tasks{}, elements{};
    for (const swap::Task& task : step.tasks) {
        const bool updates = cost::is_update(task);
        if (!updates &&
            (task.verb != swap::Verb::kernel || static_cast<cost::Op>(task.op) != cost::Op::round))
            continue;
        EXPECT_EQ(task.lane, swap::Lane::compute);
        ++tasks[updates];
        elements[updates] += planner::work_of(plan, task).elements;
    }
    int64_t runs = 0;
    for (const planner::Chunk& chunk : plan.chunks) runs += chunk.run > 0;
    EXPECT_LT(3 * runs, std::ssize(plan.chunks));
    for (const size_t which : {0U, 1U}) {
        EXPECT_EQ(tasks[which], runs);
        EXPECT_EQ(elements[which], plan.leaves * cost::kLeafElements);
    }
}

}  // namespace
}  // namespace ferry::train
