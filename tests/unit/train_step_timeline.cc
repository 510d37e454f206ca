#include <gtest/gtest.h>

#include "ferry/aio.h"
#include "planner/recording/recorder.h"
#include "planner/work.h"
#include "train/prediction/step_timeline.h"
#include "train/stack/device_needs.h"

namespace ferry::train {
namespace {

using cost::KernelTimes;
using cost::Measurements;
using cost::Op;
using swap::Lane;
using swap::Task;
using swap::Verb;

planner::Plan one_chunk() {
    planner::Plan plan;
    plan.layers.resize(1);
    plan.layer_plans.resize(1);
    plan.objects = {{}};  // all in host memory
    plan.chunks = {{.count = 8192, .weight = 0, .state = 0, .gradient = 0}};
    plan.compute = plan.wire = DType::bf16;
    return plan;
}

const Measurements kMachine{.copy_bytes_per_s = 1e9,
                            .nvme_bytes_per_s = 2e9,
                            .dram_bytes_per_s = 1e10,
                            .check_bytes_per_s = 4e9,
                            .threads = 4,
                            .device_bytes_per_s = 1e12};

// As one_chunk's tasks cost on it.
swap::CostModel costs(const planner::Plan& plan, const Measurements& measured = kMachine) {
    return cost::cost_model(planner::work_of(plan), measured);
}

TEST(CostModel, EachLaneHasItsSpeed) {
    const planner::Plan plan = one_chunk();
    Measurements measured = kMachine;
    measured.kernels
        .seconds[{static_cast<int64_t>(Op::zero), static_cast<int64_t>(plan.layers[0].kind), 77}] =
        0.5;
    const auto cost = costs(plan, measured);
    const auto op = [](Op o) { return static_cast<uint8_t>(o); };
    EXPECT_EQ(cost({.lane = Lane::compute, .op = op(Op::zero), .layer = 0, .bytes = 77}).seconds,
              0.5);
    EXPECT_EQ(cost({.verb = Verb::copy, .lane = Lane::h2d, .bytes = 1000}).seconds, 1e-6);
    EXPECT_EQ(cost({.verb = Verb::seal, .lane = Lane::check, .bytes = 4000}).seconds, 1e-6);
    // Pieces of 256 KiB are checked by as many threads, which share the memory's bandwidth.
    EXPECT_DOUBLE_EQ(
        cost({.verb = Verb::seal, .lane = Lane::check, .bytes = 2 * aio::kPieceBytes}).seconds,
        2.0 * aio::kPieceBytes / 8e9);
    EXPECT_DOUBLE_EQ(
        cost({.verb = Verb::seal, .lane = Lane::check, .bytes = 9 * aio::kPieceBytes}).seconds,
        9.0 * aio::kPieceBytes / 1e10);
    EXPECT_EQ(cost({.verb = Verb::read, .lane = Lane::read, .bytes = 2000}).seconds, 1e-6);
    EXPECT_EQ(cost({.verb = Verb::commit, .lane = Lane::write, .bytes = 2000}).seconds, 0);
    EXPECT_EQ(cost({.lane = Lane::team, .op = op(Op::load_tokens)}).seconds, 0);
    // p, m, v read and written, the gradient read, the weight written.
    EXPECT_DOUBLE_EQ(cost({.lane = Lane::team, .op = op(Op::update), .item = 0}).seconds,
                     8192 * 28 / 1e10);
}

// A GPU does so in its own memory, and needs no core for it.
TEST(CostModel, WeightsAreEncodedWhereTheyLie) {
    const planner::Plan plan = one_chunk();
    const Task encode{.lane = Lane::team,
                      .op = static_cast<uint8_t>(Op::encode_weights),
                      .layer = 0,
                      .bytes = 1000};
    Measurements measured = kMachine;
    measured.computes_on_host = true;
    const swap::Cost of_team = costs(plan, measured)(encode);
    EXPECT_DOUBLE_EQ(of_team.seconds, 1000 / 1e10);
    EXPECT_EQ(of_team.part[static_cast<size_t>(swap::Shared::cores)], 0.25);
    measured.computes_on_host = false;
    const swap::Cost of_gpu = costs(plan, measured)(encode);
    EXPECT_DOUBLE_EQ(of_gpu.seconds, 1000 / 1e12);
    EXPECT_EQ(of_gpu.part[static_cast<size_t>(swap::Shared::cores)], 0);
    EXPECT_EQ(of_gpu.part[static_cast<size_t>(swap::Shared::dram)], 0);
}

TEST(CostModel, RanksTakeTheTimeOfTheirBytesAndOfEveryCall) {
    const planner::Plan plan = one_chunk();
    Measurements machine = kMachine;
    const auto seconds = [&](int64_t bytes) {
        return costs(plan, machine)({.lane = Lane::comm, .bytes = bytes}).seconds;
    };
    EXPECT_EQ(seconds(1000), 1e-6);  // as copies, while nobody knows better
    machine.comm_bytes_per_s = 1e11;
    machine.comm_overhead_s = 2e-5;
    EXPECT_DOUBLE_EQ(seconds(1000), 2e-5 + 1e-8);
    EXPECT_DOUBLE_EQ(seconds(0), 2e-5);  // the outcome
}

TEST(CostModel, AnUpdateChecksWhatIsStored) {
    planner::Plan plan = one_chunk();
    plan.objects = {{.home = swap::Tier::nvme, .bytes = 8192 * 12},
                    {.home = swap::Tier::host, .bytes = 8192 * 2},
                    {.home = swap::Tier::nvme, .bytes = 8192 * 2}};
    plan.chunks[0].state = 0;
    plan.chunks[0].gradient = 1;
    plan.chunks[0].weight = 2;
    const auto cost = [&] {
        return costs(plan, kMachine)(
            {.lane = Lane::team, .op = static_cast<uint8_t>(Op::update), .item = 0});
    };
    // State verified and sealed, the weight sealed: by one thread, while the others are free.
    const double update_s = 8192 * 28 / 1e10, checks_s = 8192 * (12 + 12 + 2) / 4e9;
    EXPECT_DOUBLE_EQ(cost().seconds, update_s + checks_s);
    EXPECT_DOUBLE_EQ(cost().part[0], (update_s + checks_s / 4) / (update_s + checks_s));
    plan.verify = false;
    EXPECT_DOUBLE_EQ(cost().seconds, update_s);
    EXPECT_DOUBLE_EQ(cost().part[0], 1);
}

TEST(KernelTimes, WhatWasNotMeasuredCostsByItsBytesWhereItCan) {
    planner::Plan plan = one_chunk();
    plan.chunks.push_back({.count = 3 * 8192});
    const cost::WorkOf work_of = planner::work_of(plan);
    const auto kind = [&](Op op, int64_t size) {
        return KernelTimes::Kind{static_cast<int64_t>(op),
                                 static_cast<int64_t>(plan.layers[0].kind), size};
    };
    KernelTimes times;
    times.seconds = {
        {kind(Op::round, 8192), 0.25}, {kind(Op::round, 1 << 20), 7}, {kind(Op::backward, 1), 0.5}};
    const auto task = [](Op op, uint8_t flags, int32_t item) {
        return swap::Task{.op = static_cast<uint8_t>(op), .flags = flags, .layer = 0, .item = item};
    };
    EXPECT_EQ(times.of(task(Op::round, 0, 0), work_of), 0.25);
    EXPECT_DOUBLE_EQ(times.of(task(Op::round, 0, 1), work_of), 0.75);
    swap::Schedule step;
    step.tasks = {task(Op::round, 0, 1), task(Op::backward, cost::kNeedsDx, 0)};
    EXPECT_TRUE(times.covers(step, work_of));
    EXPECT_DOUBLE_EQ(times.sum(step, work_of), 1.25);
    step.tasks.push_back(task(Op::backward, 0, 0));  // another kind, not another size
    EXPECT_FALSE(times.covers(step, work_of));
}

// One is measured, and what gives each result alone; or several.
TEST(KernelTimes, BackwardWithSavedActivationsIsSoMuchShorter) {
    const planner::Plan plan = one_chunk();
    const cost::WorkOf work_of = planner::work_of(plan);
    const auto kind = [&](int64_t flags) {
        return KernelTimes::Kind{static_cast<int64_t>(Op::backward),
                                 static_cast<int64_t>(plan.layers[0].kind), flags};
    };
    using model::Saved;
    constexpr uint8_t kWhole = cost::kNeedsDx, kSaved = kWhole + cost::flag_of(Saved::attention),
                      kBoth = kSaved + cost::flag_of(Saved::mlp);
    const auto task = [](uint8_t flags) {
        return swap::Task{.op = static_cast<uint8_t>(Op::backward), .flags = flags, .layer = 0};
    };
    swap::Schedule step;
    step.tasks = {task(kWhole), task(kSaved), task(kSaved)};
    KernelTimes times;
    times.seconds = {{kind(kWhole), 0.5}};
    EXPECT_FALSE(times.covers(step, work_of));
    times.saved_s[at(Saved::mlp)] = 0.0625;
    EXPECT_FALSE(times.covers(step, work_of));
    times.saved_s[at(Saved::attention)] = 0.125;
    EXPECT_TRUE(times.covers(step, work_of));
    EXPECT_EQ(times.of(task(kBoth), work_of), 0.5 - 0.125 - 0.0625);
    EXPECT_EQ(times.sum(step, work_of), 0.5 + 2 * 0.375);
    EXPECT_EQ(times.saved_by(Saved::attention, task(kWhole), work_of), 0.125);
    EXPECT_EQ(times.saved_by(Saved::mlp, task(kWhole), work_of), 0.0625);
    times.seconds = {{kind(kSaved), 0.25}};
    EXPECT_EQ(times.sum(step, work_of), 0.375 + 2 * 0.25);
    times.seconds[kind(kWhole)] = 0.5;
    EXPECT_EQ(times.sum(step, work_of), 0.5 + 2 * 0.25);
    for (const uint8_t flags : {kWhole, kSaved})
        EXPECT_EQ(times.saved_by(Saved::attention, task(flags), work_of), 0.25);
    EXPECT_EQ(times.of(task(kBoth), work_of), 0.25 - 0.0625);  // by the most alike
    times.seconds = {{kind(kBoth), 0.25}};
    EXPECT_EQ(times.of(task(kWhole), work_of), 0.25 + 0.125 + 0.0625);
}

// A plan of this configuration takes no less by its kernels than the bound counts, however many of
// its blocks' activations are saved.
TEST(Bound, CountsNoMoreComputationThanAnyPlan) {
    const model::Shape shape{.hidden = 64,
                             .layers = 4,
                             .heads = 2,
                             .kv_heads = 1,
                             .head_dim = 32,
                             .intermediate = 128,
                             .vocab = 64};
    const model::Numerics numerics{.sequence = 64, .micro_batch = 1};
    const std::vector<model::Layer> layers = model::layers_of(shape, {}, false);
    planner::PlanRequest request;
    request.micro_batches = 2;
    constexpr int64_t kPage = 4096;
    // A block's attention takes one page for a micro-batch, what its MLP gives two.
    const auto plan_saving = [&](int64_t attention, int64_t mlp) {
        request.swap.save_attention = attention;
        request.swap.save_mlp = mlp;
        return planner::make_plan(
            request, layers, numerics,
            {.activation = kPage,
             .scratch = 1 << 20,
             .saved = {kPage, 2 * kPage},
             .saved_flops = {std::vector<double>(4, 1.0), std::vector<double>(4, 1.0),
                             std::vector<double>(4, 1.0)}},
            cost::default_measurements(request.device));
    };
    for (const int64_t room : {0, 1, 5, 8, 12, 24}) {
        request.budgets.device_bytes = kUnlimited;
        const planner::Plan none = plan_saving(0, 0);
        Measurements measurements = kMachine;
        const swap::Schedule step = record_step(none, Previous::not_speculative, false);
        for (const Task& task : step.tasks) {
            if (cost::is_timed(task))
                measurements.kernels.seconds[KernelTimes::kind_of(task, planner::work_of(none))] =
                    100;  // more than anything else
        }
        const double all = measurements.kernels.sum(step, planner::work_of(none));
        measurements.kernels.saved_s = {30, 40};
        request.budgets.device_bytes = device_buffer_bytes(none) + room * kPage;
        for (int64_t attention = 0; attention <= 4; ++attention) {
            for (int64_t mlp = 0; mlp <= 4 && 2 * attention + 4 * mlp <= room; ++mlp) {
                SCOPED_TRACE(testing::Message() << room << " pages, " << attention << ", " << mlp);
                const planner::Plan plan = plan_saving(attention, mlp);
                ASSERT_EQ(plan.blocks_saving(model::Saved::attention), attention);
                ASSERT_EQ(plan.blocks_saving(model::Saved::mlp), mlp);
                const swap::Schedule saving = record_step(plan, Previous::not_speculative, false);
                const double planned = measurements.kernels.sum(saving, planner::work_of(plan));
                EXPECT_DOUBLE_EQ(planned, all - 2 * 30 * double(attention) - 2 * 40 * double(mlp));
                const cost::Bound bound =
                    bound_of(request.budgets, plan, shape, saving, measurements);
                EXPECT_LE(bound.seconds, planned * (1 + 1e-12));
                // Copies cost nothing beside these kernels: the bound is of two groups and lets all
                // inputs go. They leave it their 8 pages, and the second micro-batch's tokens and
                // activation 2; a group's attention takes 4.
                const double of_mlps = std::min<double>(double(room) + 8 + 2 - 4, 8);
                EXPECT_DOUBLE_EQ(bound.seconds, all - 30 * 8 - 40 * of_mlps);
            }
        }
    }
}

// bf16 moments: 4 + 2 + 2 B of state instead of 12, of int8 4 + 1 + 1 and the scales; a split
// master: 2 + 4 + 4 B, and the weight is read too.
TEST(CostModel, AnUpdateMovesTheStateAsItIsKept) {
    planner::Plan plan = one_chunk();
    const Task update{.lane = Lane::team, .op = static_cast<uint8_t>(Op::update), .item = 0};
    const auto bytes_each = [&](const StateFormat& state) {
        plan.chunks[0].format = state;
        return costs(plan, kMachine)(update).seconds * 1e10 / 8192;
    };
    EXPECT_NEAR(bytes_each({.moment_type = MomentType::bf16}), 2 * 8 + 4, 1e-9);
    EXPECT_NEAR(bytes_each({.split = true}), 2 * 10 + 6, 1e-9);
    EXPECT_NEAR(bytes_each({.moment_type = MomentType::bf16, .split = true}), 2 * 6 + 6, 1e-9);
    EXPECT_NEAR(bytes_each({.moments = 0, .split = true}), 2 * 2 + 6, 1e-9);
    EXPECT_NEAR(bytes_each({.moment_type = MomentType::int8}), 2 * (6 + 2 * 4.0 / 256) + 4, 1e-9);
}

TEST(CostModel, TheHostsCoresAreSharedWhereItComputes) {
    const planner::Plan plan = one_chunk();
    const auto part = [&](bool on_host) {
        Measurements machine = kMachine;
        machine.computes_on_host = on_host;
        return costs(plan, machine)({.verb = Verb::copy, .lane = Lane::d2h}).part;
    };
    EXPECT_EQ(part(true), (std::array<double, swap::kShared>{0.25, 0, 0.2}));  // read and written
    EXPECT_EQ(part(false), (std::array<double, swap::kShared>{0, 0, 0.1}));
}

// Every task that moves bytes through memory takes its part of it: an update all, storage by its
// bytes.
TEST(CostModel, MemoryIsSharedByWhateverGoesThroughIt) {
    planner::Plan plan = one_chunk();
    Measurements machine = kMachine;
    machine.computes_on_host = false;
    machine.dram_per_nvme_byte = 2;
    const auto dram = [&](const Task& task) {
        return costs(plan, machine)(task).part[static_cast<size_t>(swap::Shared::dram)];
    };
    const auto update = static_cast<uint8_t>(Op::update);
    EXPECT_EQ(dram({.lane = Lane::team, .op = update, .item = 0}), 1);
    EXPECT_EQ(dram({.verb = Verb::copy, .lane = Lane::h2d, .bytes = 1}), 0.1);
    EXPECT_EQ(dram({.verb = Verb::read, .lane = Lane::read, .bytes = 1}), 0.4);
    EXPECT_EQ(dram({.verb = Verb::seal, .lane = Lane::check, .bytes = 1}), 0.4);
    // The GPU's own memory is another one; a CPU device's is the same.
    EXPECT_EQ(dram({.lane = Lane::compute, .op = update, .item = 0}), 0);
    machine.computes_on_host = true;
    EXPECT_EQ(dram({.lane = Lane::compute, .op = update, .item = 0}), 1);
}

TEST(CostModel, StorageTakesTheCoresThatMoveItsBytes) {
    const planner::Plan plan = one_chunk();
    Measurements machine = kMachine;
    const auto cores = [&](Lane lane, Verb verb) {
        return costs(plan, machine)({.verb = verb, .lane = lane, .bytes = 1})
            .part[static_cast<size_t>(swap::Shared::cores)];
    };
    EXPECT_EQ(cores(Lane::read, Verb::read), 0);
    machine.cores_per_nvme_byte = 0.5e-9;  // at 2 GB/s one of the four
    EXPECT_DOUBLE_EQ(cores(Lane::read, Verb::read), 0.25);
    EXPECT_DOUBLE_EQ(cores(Lane::write, Verb::write), 0.25);
    EXPECT_EQ(cores(Lane::write, Verb::commit), 0);
    machine.cores_per_nvme_byte = 1;
    EXPECT_EQ(cores(Lane::write, Verb::write), 1) << "there are no more";
}

TEST(CostModel, TheDeviceUpdatesAtTheRateOfItsOwnMemory) {
    const planner::Plan plan = one_chunk();
    const auto cost = costs(plan, kMachine);
    const Task update{.lane = Lane::compute, .op = static_cast<uint8_t>(Op::update), .item = 0};
    EXPECT_DOUBLE_EQ(cost(update).seconds, 8192 * 28 / 1e12);
    // No kernel that is timed, for timing it would change the state.
    swap::Schedule step;
    step.tasks = {update};
    EXPECT_TRUE(KernelTimes{}.covers(step, planner::work_of(plan)));
    EXPECT_EQ(KernelTimes{}.sum(step, planner::work_of(plan)), 0);
}

}  // namespace
}  // namespace ferry::train
