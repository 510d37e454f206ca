// The arithmetic of layouts (cost/layout_seconds.h) beside the exact plans of the same ranks.
#include "cost/layout_seconds.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <vector>

#include "cost/traffic.h"
#include "train/prediction/config_facts.h"
#include "train/prediction/predictor.h"
#include "train/setup/from_config.h"
#include "train/setup/stages.h"

namespace ferry::train {
namespace {

struct Ways {
    int tensor = 1, sequence = 1, pipeline = 1, replicas = 1;
    int64_t zero_stage = 1, groups = 1;
    bool tied = false, splits = false;
    int kv_heads = 8;
    int ranks() const { return tensor * sequence * pipeline * replicas; }
};
constexpr int64_t kMicroBatches = 8;  // of a replica

// Whole shards, so that nothing is padded but for what the arithmetic pads too.
Config config_of(const Ways& of) {
    Config config;
    config.model = {.hidden = 4096,
                    .layers = 8,
                    .heads = 32,
                    .kv_heads = of.kv_heads,
                    .head_dim = 128,
                    .intermediate = 11008,
                    .vocab = 32'000,
                    .tie_embeddings = of.tied};
    config.precision = DType::bf16;
    config.batch = {
        .sequence = 2048, .micro_batch = 1, .micro_batches = kMicroBatches * of.replicas};
    config.zero.stage = of.zero_stage;
    config.parallel.tensor = of.tensor;
    config.parallel.sequence = of.sequence;
    config.parallel.pipeline = of.pipeline;
    config.parallel.schedule =
        of.splits ? PipelineSchedule::zero_bubble : PipelineSchedule::one_f_one_b;
    if (of.pipeline > 1) config.swap.groups = of.groups;
    return config;
}

bool divides_rows(const planner::Plan& plan) {
    return plan.partition.slices > 1 && plan.input_bytes < plan.tokens * 4096 * 2;
}

// The exact plans of all stages, and the arithmetic's layout.
struct Both {
    explicit Both(const Ways& of)
        : config(config_of(of)),
          predictor(Predictor::make(config, {of.ranks(), 1})),
          plans(predictor->plans(request_of(config))),
          model(model_sizes(config)),
          measured(predictor->assumed(plans.front())) {
        model.shares_rows = divides_rows(plans.front());
        layout =
            cost::weigh(model,
                        {.ranks = of.ranks(),
                         .on_a_host = of.ranks(),
                         .measured = measured,
                         .device_bytes = 1e18,
                         .host_bytes = 1e18},
                        {.tensor = of.tensor,
                         .sequence = of.sequence,
                         .pipeline = of.pipeline,
                         .replicas = of.replicas,
                         .order = of.splits ? cost::Order::zero_bubble : cost::Order::one_f_one_b,
                         .zero_stage = of.zero_stage,
                         .micro_batches = kMicroBatches,
                         .groups = of.groups,
                         .state = cost::StateOn::host})
                .layout;
    }
    // Of the stage that has most.
    template <class Of>
    auto most(const Of& of) const {
        auto found = of(plans.front());
        for (const planner::Plan& plan : plans) found = std::max(found, of(plan));
        return found;
    }
    double step_seconds() const {
        return predictor->predict(request_of(config), plans.front(), measured)
            .timeline.step_seconds;
    }

    const Config config;
    const std::unique_ptr<Predictor> predictor;
    const std::vector<planner::Plan> plans;
    cost::ModelSizes model;
    const cost::Measurements measured;
    cost::Layout layout{};
};

std::vector<Ways> all_ways() {
    std::vector<Ways> ways;
    for (const int tensor : {1, 2, 4})
        for (const int pipeline : {1, 2, 4})
            for (const int replicas : {1, 2})
                for (const int64_t stage : {1, 3}) {
                    if (stage == 3 && replicas == 1) continue;
                    ways.push_back({.tensor = tensor,
                                    .pipeline = pipeline,
                                    .replicas = replicas,
                                    .zero_stage = stage,
                                    .groups = pipeline > 1 ? kMicroBatches : 1});
                }
    ways.push_back({.tied = true});
    for (const int64_t stage : {0, 2}) {
        ways.push_back({.replicas = 2, .zero_stage = stage});
        ways.push_back({.tensor = 2, .pipeline = 2, .replicas = 2, .zero_stage = stage});
    }
    // Heads that do not divide, and more ranks than heads of keys.
    ways.push_back({.tensor = 3});
    ways.push_back({.tensor = 3, .replicas = 2});
    ways.push_back({.tensor = 4, .replicas = 2, .kv_heads = 2});
    ways.push_back({.tensor = 2, .pipeline = 2, .groups = 4, .tied = true});
    ways.push_back({.sequence = 2});
    ways.push_back({.tensor = 2, .sequence = 2, .replicas = 2, .zero_stage = 3});
    ways.push_back({.pipeline = 4, .groups = kMicroBatches, .splits = true});
    return ways;
}

testing::Message text_of(const Ways& of) {
    return testing::Message() << "T " << of.tensor << ", S " << of.sequence << ", P " << of.pipeline
                              << ", D " << of.replicas << ", ZeRO " << of.zero_stage
                              << (of.tied ? ", tied" : "");
}

// State and gradients to the byte; what ranks send each other nearly, for norms send a little more.
TEST(Layouts, HaveTheBytesOfTheExactPlan) {
    for (const Ways& of : all_ways()) {
        SCOPED_TRACE(text_of(of));
        const Both both(of);
        EXPECT_EQ(both.layout.state_bytes, both.most([](const planner::Plan& plan) {
            int64_t bytes = 0;
            for (const planner::Chunk& chunk : plan.chunks)
                if (chunk.trainable)
                    bytes += plan.objects[static_cast<size_t>(chunk.state)].bytes +
                             plan.objects[static_cast<size_t>(chunk.gradient)].bytes;
            return bytes;
        }));
        // Stage 3 counts a visit; each group makes it.
        const double visits =
            of.zero_stage == 3 ? static_cast<double>(both.plans.front().groups) : 1;
        EXPECT_NEAR(both.layout.zero_bytes, both.most([&](const planner::Plan& plan) {
            const auto bytes = [&](zero::Exchanged what) {
                return cost::comm_traffic(plan.layers, plan.partition, plan.compute, plan.wire,
                                          what)
                    .bytes();
            };
            const double weights = bytes(zero::Exchanged::nothing);
            return visits * weights + bytes(zero::Exchanged::gradients) - weights;
        }),
                    1e-9 * both.layout.zero_bytes);
        const auto in_kernels = [&](const planner::Plan& plan, bool of_tensors) {
            double bytes = 0;
            for (int64_t l = 0; l < std::ssize(plan.layers); ++l) {
                const model::Layer& layer = plan.layers[static_cast<size_t>(l)];
                if (!plan.partition.stage.has(l)) continue;
                const model::BlockExchanges its = plan.exchanges_of(l);
                const model::BlockExchanges::Group& group = of_tensors ? its.slices : its.sequence;
                // The head's backward is both.
                bytes += static_cast<double>(
                    group.bytes(true) +
                    (layer.kind == model::LayerKind::head ? 0 : group.bytes(false)));
            }
            return bytes * kMicroBatches;
        };
        for (const bool of_tensors : {true, false}) {
            const double bytes = of_tensors ? both.layout.tensor_bytes : both.layout.sequence_bytes;
            EXPECT_NEAR(bytes, both.most([&](const planner::Plan& plan) {
                return in_kernels(plan, of_tensors);
            }),
                        1e-3 * bytes)
                << of_tensors;
        }
    }
}

// cost::kSharesRows is what the kernels do.
TEST(Layouts, DivideTheRowsOfTheResidualStreamAsKernelsDo) {
    EXPECT_EQ(cost::kSharesRows, divides_rows(Both({.tensor = 2}).plans.front()));
}

TEST(Layouts, WaitAsSchedulesDo) {
    for (const int64_t groups : {1, 2, 5, 16, 200}) {
        for (const int stages : {2, 3, 8, 64}) {
            for (const int64_t size : {1, 2, 8}) {
                for (const int64_t blocks : {1, 2, 9}) {
                    for (const bool splits : {false, true}) {
                        const cost::Passing of{
                            .order = splits ? cost::Order::zero_bubble : cost::Order::one_f_one_b,
                            .stages = stages,
                            .groups = groups,
                            .group_size = size,
                            .blocks = blocks};
                        const double waits = cost::waiting_visits(of);
                        EXPECT_DOUBLE_EQ(waits / (of.visits() + waits),
                                         bubble_of(groups, stages, size, blocks, splits));
                    }
                }
            }
        }
    }
}

// By the same rates. A plan divides state, and simulates what hides what.
TEST(Layouts, TakeAsLongAsTheExactPlanNearly) {
    for (const Ways& of : std::vector<Ways>{{},
                                            {.replicas = 2},
                                            {.replicas = 2, .zero_stage = 3},
                                            {.tensor = 2},
                                            {.pipeline = 2, .groups = 2},
                                            {.pipeline = 4, .groups = 8},
                                            {.pipeline = 4, .groups = 8, .splits = true},
                                            {.tensor = 2, .pipeline = 2, .groups = 4},
                                            {.sequence = 2}}) {
        SCOPED_TRACE(text_of(of));
        const Both both(of);
        const double ratio = both.layout.seconds / both.step_seconds();
        EXPECT_GT(ratio, 0.87);
        EXPECT_LT(ratio, 1.13);
    }
}

}  // namespace
}  // namespace ferry::train
