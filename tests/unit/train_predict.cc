#include <gtest/gtest.h>

#include "predict.h"

namespace ferry::train {
namespace {

using planner::Op;
using swap::Lane;
using swap::Verb;

planner::Plan one_chunk() {
    planner::Plan plan;
    plan.layers.resize(1);
    plan.chunks = {{.count = 8192}};
    plan.compute = plan.wire = DType::bf16;
    plan.state_parts = 3;
    return plan;
}

const Machine kMachine{
    .links = {.copy_bytes_per_s = 1e9, .nvme_bytes_per_s = 2e9, .dram_bytes_per_s = 1e10},
    .check_bytes_per_s = 4e9,
    .threads = 4};

TEST(CostModel, EachLaneHasItsSpeed) {
    const planner::Plan plan = one_chunk();
    KernelTimes kernels;
    kernels.seconds[{static_cast<int64_t>(Op::forward), static_cast<int64_t>(plan.layers[0].kind),
                     77}] = 0.5;
    const auto cost = cost_model(plan, kernels, kMachine);
    const auto op = [](Op o) { return static_cast<uint8_t>(o); };
    EXPECT_EQ(cost({.lane = Lane::compute, .op = op(Op::forward), .bytes = 77}).seconds, 0.5);
    EXPECT_EQ(cost({.verb = Verb::copy, .lane = Lane::h2d, .bytes = 1000}).seconds, 1e-6);
    EXPECT_EQ(cost({.verb = Verb::seal, .lane = Lane::check, .bytes = 4000}).seconds, 1e-6);
    EXPECT_EQ(cost({.verb = Verb::read, .lane = Lane::read, .bytes = 2000}).seconds, 1e-6);
    EXPECT_EQ(cost({.verb = Verb::commit, .lane = Lane::write, .bytes = 2000}).seconds, 0);
    EXPECT_EQ(cost({.lane = Lane::team, .op = op(Op::load_tokens)}).seconds, 0);
    // p, m, v read and written, the gradient read, the weight written.
    EXPECT_DOUBLE_EQ(cost({.lane = Lane::team, .op = op(Op::update)}).seconds, 8192 * 28 / 1e10);
}

TEST(CostModel, TheHostsCoresAreSharedWhereItComputes) {
    const planner::Plan plan = one_chunk();
    const auto part = [&](bool on_host) {
        Machine machine = kMachine;
        machine.computes_on_host = on_host;
        return cost_model(plan, {}, machine)({.verb = Verb::copy, .lane = Lane::d2h}).part;
    };
    EXPECT_EQ(part(true), (std::array<double, swap::kShared>{0.25, 0, 0}));
    EXPECT_EQ(part(false), (std::array<double, swap::kShared>{}));
}

}  // namespace
}  // namespace ferry::train
