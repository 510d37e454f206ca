// Pipelines of ranks for tests: how ranks are cut into stages, and what is planned of them.
#pragma once

#include <gtest/gtest.h>

#include <functional>

#include "tests/support/run_ranks.h"
#include "tests/support/temporary_directory.h"
#include "tests/support/tiny_run.h"
#include "train/inside.h"
#include "train/prediction/predictor.h"
#include "train/prediction/simulated_stages.h"
#include "train/setup/from_config.h"

namespace ferry::train {

// So many ranks, in so many stages, of which so many share tensors.
struct RankCut {
    int ranks = 1, stages = 1, tensor = 1;
    PipelineSchedule schedule = PipelineSchedule::one_f_one_b;
    int virtual_stages = 1;
    int of_a_stage() const { return ranks / stages; }
    friend void PrintTo(const RankCut& cut, std::ostream* out) {
        *out << cut.ranks << "By" << cut.stages << "By" << cut.tensor;
    }
};

inline Config staged(Config config, const RankCut& cut) {
    config.parallel.pipeline = cut.stages;
    config.parallel.tensor = cut.tensor;
    if (cut.schedule == PipelineSchedule::one_f_one_b) return config;
    config.parallel.schedule = cut.schedule;
    config.parallel.virtual_stages = cut.virtual_stages;
    return config;
}

// `with` is done with the engine of each rank.
using OnRank = std::function<void(Engine&, int rank)>;
inline void on_ranks(const Config& config, const RankCut& cut, const std::string& checkpoint,
                     const OnRank& with) {
    const auto go = [&](Runtime runtime, int rank) {
        runtime.checkpoint = checkpoint;
        const auto engine = Engine::make(staged(config, cut), std::move(runtime));
        with(*engine, rank);
    };
    if (cut.ranks == 1) {
        const auto executor = make_thread_executor();
        return go({.executor = executor.get()}, 0);
    }
    comm::on_run_ranks(
        cut.ranks, [&](std::unique_ptr<comm::Communicator> others, Executor& executor) {
            const int rank = others->rank();
            go(train::with({.executor = &executor}, {.ranks = std::move(others)}), rank);
        });
}

class PlannedPipeline : public testing::Test {
protected:
    void SetUp() override {
        if (comm::ranks_launched() > 0) GTEST_SKIP() << "for threads of one process";
    }
    Config config(bool tied, int64_t layers = 5) const {
        Config config = tiny_config(data_);
        config.model.layers = layers;
        config.model.tie_embeddings = tied;
        config.batch = {.sequence = 8, .micro_batch = 1, .micro_batches = 8};
        config.zero.stage = 1;
        config.steps = 3;
        return config;
    }
    // So many micro-batches that it is predicted by shorter ones.
    Config with_a_long_step() const {
        Config config = this->config(false, 4);
        config.model.hidden = 256;
        config.model.head_dim = 64;
        config.model.intermediate = 768;
        config.batch.micro_batches = 1024;
        config.budgets.device_bytes = config.budgets.host_bytes = kUnlimited;
        return config;
    }
    static double bytes_of_gradients(const planner::Plan& plan) {
        return static_cast<double>(4 * plan.chunks.size() * plan.chunk_elements);
    }
    static std::unique_ptr<Predictor> predictor(const Config& config, const RankCut& cut) {
        return Predictor::make(staged(config, cut), {.ranks = cut.ranks, .on_a_host = cut.ranks});
    }

    // A block takes a second forward and three back, of which one are its weights' gradients.
    static void expect_to_wait_as_theory_says(const Config& config, const RankCut& cut) {
        const bool splits = config.parallel.schedule == PipelineSchedule::zero_bubble;
        const auto planned = predictor(config, cut);
        const planner::PlanRequest request = request_of(staged(config, cut));
        const planner::Plan plan = planned->plan(request);
        cost::Measurements only = planned->assumed(plan);
        only.copy_bytes_per_s = only.dram_bytes_per_s = only.device_bytes_per_s = 1e18;
        only.comm_bytes_per_s = only.check_bytes_per_s = 1e18;
        only.update_overhead_s = only.comm_overhead_s = 0;
        only.computes_on_host = false;
        only.kernels.saved_s = {};
        for (auto& [kind, seconds] : only.kernels.seconds) {
            const auto op = static_cast<cost::Op>(kind[0]);
            seconds = op == cost::Op::forward || op == cost::Op::weight_gradients ? 1
                      : op == cost::Op::backward                                  ? (splits ? 2 : 3)
                                                                                  : 0;
        }
        const Prediction step = planned->predict(request, plan, only);
        // A block visits a micro-batch forward and back in 4 s.
        const auto visits =
            static_cast<double>(plan.micro_batches * config.model.layers / cut.stages);
        const double expected = 4 * visits / (1 - bubble_of(plan));
        EXPECT_NEAR(step.timeline.step_seconds, expected, 1e-3 * expected);
        for (const StagePrediction& stage : step.stages) {
            EXPECT_NEAR(stage.waits, bubble_of(plan), 1e-3);
            EXPECT_NEAR(stage.compute_seconds, 4 * visits, 1e-3 * expected);
        }
    }

    const TinyData data_;
    const TemporaryDirectory storage_{"/var/tmp"};
};

}  // namespace ferry::train
