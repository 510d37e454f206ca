// Pipelines of ranks: which schedule is chosen for them.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <spdlog/fmt/fmt.h>

#include <functional>

#include "tests/contract/train_pipelines_fixture.h"
#include "tests/support/run_ranks.h"
#include "train/inside.h"
#include "train/prediction/predictor.h"
#include "train/prediction/simulated_stages.h"
#include "train/setup/from_config.h"

namespace ferry::train {
namespace {

// Where nothing but the blocks' kernels takes time, what fills bubbles is faster.
TEST_F(PlannedPipeline, ChooseTheScheduleWithTheShortestStep) {
    Config config = this->config(false, 4);
    config.budgets.device_bytes = kUnlimited;
    const RankCut cut{2, 2};
    const auto planned = predictor(config, cut);
    cost::Measurements fast = planned->planned_by();
    fast.copy_bytes_per_s = fast.dram_bytes_per_s = fast.device_bytes_per_s = 1e18;
    fast.comm_bytes_per_s = fast.check_bytes_per_s = 1e18;
    fast.update_overhead_s = fast.comm_overhead_s = 0;
    fast.computes_on_host = false;
    planned->choose_schedule(fast);
    const ScheduleChoice choice = planned->schedules();
    ASSERT_EQ(choice.offers.size(), orders_to_choose(staged(config, cut), 4).size());
    EXPECT_EQ(choice.schedule(), PipelineSchedule::zero_bubble);
    const ScheduleOffer &plain = choice.offers[0], &split = choice.offers[1];
    EXPECT_LT(split.seconds, plain.seconds);
    EXPECT_LT(split.waits, plain.waits);
    EXPECT_GT(split.device_bytes, plain.device_bytes);
    EXPECT_TRUE(planned->plan(request_of(staged(config, cut))).partition.stage.splits_backward);
    const std::string said = text_of(choice);
    EXPECT_THAT(said, testing::StartsWith("zero_bubble, the fastest as simulated: 1f1b "));
    planned->choose_schedule(fast);
    EXPECT_EQ(text_of(planned->schedules()), said);
    // A network that all wait for leaves nothing to fill.
    cost::Measurements slow = fast;
    slow.between_stages = {.bytes_per_s = 10, .overhead_s = 0};
    planned->choose_schedule(slow);
    EXPECT_EQ(planned->schedules().schedule(), PipelineSchedule::one_f_one_b);
    EXPECT_FALSE(planned->plan(request_of(staged(config, cut))).partition.stage.splits_backward);
}

// What the last stage leaves of weights' gradients takes device memory that there is not.
class Tight : public PlannedPipeline {
protected:
    static bool fits(Config config, PipelineSchedule schedule, int64_t* smallest = nullptr) {
        config.parallel.schedule = schedule;
        try {
            predictor(config, {2, 2})->plans(request_of(staged(config, {2, 2})));
        } catch (const planner::DoesNotFit& refusal) {
            if (smallest) *smallest = refusal.smallest();
            return false;
        }
        return true;
    }
    // As much device memory as both stages need of one group after the other, and no more.
    static Config tightened(Config config) {
        config.swap.chunk_elements = 4096;
        config.budgets.device_bytes = 4096;
        int64_t &bytes = config.budgets.device_bytes, smallest = bytes;
        for (int tries = 0; tries < 100; ++tries) {
            if (fits(config, PipelineSchedule::one_f_one_b, &smallest)) return config;
            bytes = std::max(bytes + 4096, smallest);
        }
        ADD_FAILURE() << "nothing fits";
        return config;
    }
    Config tight() const { return tightened(this->config(false, 4)); }
};

// Weights that stream come again for each group, and not at all where they stay.
TEST_F(Tight, CountsTheWeightsThatStream) {
    const auto streamed = [&](int64_t groups, bool stays) {
        Config config = this->config(false, 4);
        config.swap.groups = groups;
        config.budgets.device_bytes = kUnlimited;
        if (!stays) config = tightened(config);
        return predictor(config, {2, 2})->schedules().offers[0].weight_bytes;
    };
    EXPECT_GT(streamed(2, false), 0);
    EXPECT_GT(streamed(8, false), 2 * streamed(2, false));
    EXPECT_LT(streamed(8, true), streamed(2, false));
}

TEST_F(Tight, WhatDoesNotFitIsNotChosen) {
    const Config config = tight();
    const auto planned = predictor(config, {2, 2});
    const ScheduleChoice& choice = planned->schedules();
    EXPECT_NE(choice.schedule(), PipelineSchedule::zero_bubble);
    ASSERT_FALSE(choice.offers[0].refusal);
    ASSERT_TRUE(choice.offers[1].refusal);
    const std::string said = text_of(choice);
    EXPECT_THAT(said, testing::HasSubstr("; not zero_bubble: "));
    EXPECT_THAT(said, testing::HasSubstr(" of 2)"));
}

struct Chosen {
    bool splits = false;
    int64_t virtual_stages = 1;
    bool is_recorded = false;  // in the numerics record
    std::vector<double> losses{};
    uint64_t hash = 0;
    bool operator==(const Chosen&) const = default;
};
// What a rank of each number did, the same of all. `measurements`: a rank's own; may be null.
Chosen chosen_by(const Config& config, const RankCut& cut,
                 const std::function<const cost::Measurements*(int rank)>& measurements = {}) {
    std::vector<Chosen> all(static_cast<size_t>(cut.ranks));
    comm::on_run_ranks(
        cut.ranks, [&](std::unique_ptr<comm::Communicator> others, Executor& executor) {
            const int rank = others->rank();
            InsideOptions given{.measurements = measurements ? measurements(rank) : nullptr,
                                .ranks = std::move(others)};
            const auto engine = Engine::make(
                staged(config, cut), train::with({.executor = &executor}, std::move(given)));
            Chosen& mine = all[static_cast<size_t>(rank)];
            const zero::Stage& stage = Inside(*engine).plan().partition.stage;
            mine.splits = stage.splits_backward;
            mine.virtual_stages = stage.virtual_stages();
            mine.is_recorded = engine->numerics_record().find(fmt::format(
                                   " in {} rounds", mine.virtual_stages)) != std::string::npos;
            while (engine->last_step() < config.steps) mine.losses.push_back(engine->step().loss);
            mine.hash = engine->state_hash();
        });
    for (const Chosen& one : all) EXPECT_EQ(one, all.front());
    return all.front();
}

// Every rank the same, and the bits of either; also where each alone would have chosen otherwise.
TEST_F(Tight, RanksChooseAsOne) {
    for (const RankCut cut : {RankCut{2, 2}, RankCut{4, 2}, RankCut{4, 4}}) {
        SCOPED_TRACE(testing::PrintToString(cut));
        Config config = this->config(false, 4);
        config.clip_norm = 0;
        std::vector<Chosen> fixed;
        for (const StageOrder& order : orders_to_choose(config, 4))
            fixed.push_back(chosen_by(with_order(config, order), cut));
        EXPECT_EQ(fixed[0].hash, fixed[1].hash);
        EXPECT_EQ(fixed[0].losses, fixed[1].losses);
        cost::Measurements fast = predictor(config, cut)->planned_by(), slow = fast;
        fast.comm_bytes_per_s = 1e18;
        fast.comm_overhead_s = 0;
        slow.between_stages = {.bytes_per_s = 10, .overhead_s = 0};
        const auto ranks = [&](bool first_is_slow) {
            return [&, first_is_slow](int rank) {
                return (rank == 0) == first_is_slow ? &slow : &fast;
            };
        };
        const Chosen by_slow = chosen_by(config, cut, ranks(true));
        EXPECT_EQ(by_slow, fixed[0]);
        const Chosen by_fast = chosen_by(config, cut, ranks(false));
        EXPECT_EQ(by_fast.hash, fixed[0].hash);
        EXPECT_EQ(by_fast.losses, fixed[0].losses);
    }
}

// Where the number of virtual stages is ferry's choice too, a run takes what its plan does, the
// record names it, and no bit differs where nothing is clipped.
TEST_F(Tight, RanksChooseVirtualStagesAsPlansDo) {
    const RankCut cut{2, 2};
    Config config = this->config(false, 4);
    config.clip_norm = 0;
    const Chosen plain = chosen_by(with_order(config, {PipelineSchedule::one_f_one_b}), cut);
    EXPECT_FALSE(plain.is_recorded);
    config.parallel.virtual_stages = std::nullopt;
    for (const PipelineSchedule schedule :
         {PipelineSchedule::automatic, PipelineSchedule::interleaved,
          PipelineSchedule::round_robin}) {
        SCOPED_TRACE(std::string(name_of(schedule)));
        config.parallel.schedule = schedule;
        const auto planned = predictor(config, cut);
        const std::vector<StageOrder> orders = orders_to_choose(staged(config, cut), 4);
        ASSERT_EQ(planned->schedules().offers.size(), orders.size());
        const StageOrder& order = planned->schedules().order();
        const Chosen chosen = chosen_by(config, cut);
        EXPECT_EQ(chosen.virtual_stages, order.virtual_stages);
        EXPECT_EQ(chosen.is_recorded, order.virtual_stages > 1);
        EXPECT_EQ(chosen.splits, order.schedule == PipelineSchedule::zero_bubble);
        EXPECT_EQ(chosen.losses, plain.losses);
        EXPECT_EQ(chosen, chosen_by(with_order(config, order), cut));
        EXPECT_TRUE(schedule != PipelineSchedule::interleaved || chosen.virtual_stages == 2);
    }
}

// One stage alone has no room; and where none has for either, all ranks say which.
TEST_F(Tight, RanksWithoutRoomAreHeard) {
    Config config = tight();
    config.clip_norm = 0;
    const RankCut cut{2, 2};
    const Chosen fixed = chosen_by(with_order(config, {PipelineSchedule::one_f_one_b}), cut);
    EXPECT_EQ(chosen_by(config, cut), fixed);
    config.budgets.device_bytes = 4096;
    comm::on_run_ranks(
        cut.ranks, [&](std::unique_ptr<comm::Communicator> others, Executor& executor) {
            try {
                Engine::make(staged(config, cut),
                             train::with({.executor = &executor}, {.ranks = std::move(others)}));
                ADD_FAILURE() << "it fits";
            } catch (const Error& error) {
                EXPECT_EQ(error.trouble(), Trouble::does_not_fit);
                EXPECT_THAT(error.what(), testing::HasSubstr("stage 0 of 2"));
            }
        });
}

}  // namespace
}  // namespace ferry::train
