// The order in which a step asks for copies.
#include <gtest/gtest.h>

#include <algorithm>

#include "step.h"

namespace ferry::train {
namespace {

constexpr int64_t kBlocks = 4, kMicroBatches = 2;

// All weights on the device, state and block inputs in host memory.
planner::Plan inputs_away() {
    const model::Shape shape{.hidden = 64,
                             .layers = kBlocks,
                             .heads = 2,
                             .kv_heads = 1,
                             .head_dim = 32,
                             .intermediate = 128,
                             .vocab = 64};
    planner::PlanRequest request;
    request.micro_batches = kMicroBatches;
    request.swap = {.speculate = Speculate::all, .state_on_device = 0, .save_inputs = 0};
    return planner::make_plan(
        request, model::layers_of(shape, {}, false), {.sequence = 64, .micro_batch = 1},
        {.activation = 16384, .scratch = 1 << 20}, cost::default_measurements(request.device));
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

}  // namespace
}  // namespace ferry::train
