// The stages of a start-up that need no tier stack, each alone.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "ferry/error.h"
#include "tests/support/tiny_run.h"
#include "train/resuming/first_state.h"
#include "train/run/first_contents.h"
#include "train/run/run_plans.h"
#include "train/run/run_setup.h"
#include "train/setup/stages.h"
#include "train/stack/threads.h"

namespace ferry::train {
namespace {

using testing::ElementsAre;
using testing::SizeIs;

class StartUpStages : public testing::Test {
protected:
    // As one process has it.
    RunSetup set_up_run() {
        Runtime runtime{.executor = executor_.get()};
        const auto context = std::make_shared<ComputeContext>();
        context->open(config_, runtime);
        return set_up(config_, runtime, context);
    }
    // The same as this rank of so many would have it, without the others.
    RunSetup set_up_rank(int rank, int ranks) {
        const int stages = std::exchange(config_.parallel.pipeline, 1);
        RunSetup setup = set_up_run();
        setup.config.parallel.pipeline = stages;
        setup.world = world_of(setup.config, rank, ranks, ranks);
        return setup;
    }
    FirstState first_state(const RunSetup& setup, const Runtime& runtime = {}) {
        return {{.config = setup.config,
                 .described = setup.described,
                 .layers = setup.layers,
                 .tokens = setup.loader->info(),
                 .identity = setup.checkpoint_identity},
                runtime};
    }

    const TinyData data_;
    const std::unique_ptr<Executor> executor_ = make_thread_executor();
    Config config_ = tiny_config(data_);
};

TEST_F(StartUpStages, SetupFollowsFromTheConfiguration) {
    const RunSetup setup = set_up_run();
    EXPECT_EQ(setup.ranks, nullptr);
    EXPECT_EQ(setup.sharers, nullptr);
    EXPECT_TRUE(setup.is_first_rank());
    EXPECT_FALSE(setup.scales_loss());
    EXPECT_EQ(setup.share.micro_batches, config_.batch.micro_batches);
    EXPECT_EQ(setup.shape().hidden, 16);
    EXPECT_THAT(setup.layers, SizeIs(4));
    EXPECT_EQ(setup.description, "") << "and no checkpoints are written";
    config_.precision = DType::f16;
    EXPECT_TRUE(set_up_run().scales_loss());
}

TEST_F(StartUpStages, ARankAloneHasAllLayers) {
    const Cut cut = cut_of(set_up_run());
    ASSERT_THAT(cut.stages, SizeIs(1));
    EXPECT_EQ(cut.partition.ranks, 1);
    EXPECT_TRUE(cut.partition.stage.all());
}

// Nothing is left of an order that was tried before.
TEST_F(StartUpStages, AnOrderCutsTheLayersAnew) {
    config_.model.layers = 4;
    config_.parallel.pipeline = 2;
    config_.parallel.schedule = PipelineSchedule::automatic;
    config_.parallel.virtual_stages = std::nullopt;
    const RunSetup setup = set_up_rank(1, 2);
    const auto blocks_of = [&](const Cut& cut) {
        EXPECT_THAT(cut.stages, SizeIs(2));
        return blocks_text(cut.partition.stage, std::ssize(setup.layers));
    };
    const Cut open = cut_of(setup);
    EXPECT_EQ(blocks_of(open), "blocks 2 to 3");
    const Cut rounds = with_order(open, setup, {PipelineSchedule::interleaved, 2});
    EXPECT_EQ(blocks_of(rounds), "blocks 1, 3");
    EXPECT_EQ(rounds.config.parallel.virtual_stages, 2);
    const Cut line = with_order(rounds, setup, {PipelineSchedule::one_f_one_b, 1});
    EXPECT_EQ(blocks_of(line), "blocks 2 to 3");
    EXPECT_EQ(line.config.parallel.virtual_stages, 1);
    EXPECT_EQ(setup.config.parallel.virtual_stages, std::nullopt);
}

TEST_F(StartUpStages, ANewStateIsDrawn) {
    const RunSetup setup = set_up_run();
    FirstState first = first_state(setup);
    EXPECT_EQ(first.saved(), nullptr);
    EXPECT_EQ(first.imported(), nullptr);
    const std::unique_ptr<NodeTeams> teams =
        make_teams(1, DeviceKind::cpu, discover_topology(), *executor_, 1);
    const StateIo::Contents contents = first.contents({}, {.value = 0.5F}, teams->all(), 0);
    EXPECT_FALSE(contents.begin) << "no file is read ahead";
    EXPECT_FALSE(contents.moments);
    EXPECT_EQ(contents.first_moment.value, 0.5F);
    std::vector<float> drawn(64), expected(64);
    contents.master(setup.layers[1], 0, drawn);
    model::initialise(setup.shape(), setup.layers[1], config_.seed, 0, expected);
    EXPECT_EQ(drawn, expected);
    first.weights()(setup.layers[1], 0, drawn);
    EXPECT_EQ(drawn, expected);
}

TEST_F(StartUpStages, AFirstStateThatIsNotThereIsRefused) {
    const RunSetup setup = set_up_run();
    EXPECT_THROW(first_state(setup, {.checkpoint = "/nowhere/step-00000001"}), Error);
    EXPECT_THROW(first_state(setup, {.imported = {.directory = "/nowhere"}}), Error);
}

// Moments that are not there have seen no update, and only fp16 scales.
TEST(ImportedRun, GoesOnWithWhatItHas) {
    const Imported imported{
        .step = 9, .updates = 8, .moment_updates = 7, .loss_scale = 512, .good_steps = 5};
    const RunState whole = run_of(imported, true, LossScale(true));
    EXPECT_THAT((std::vector{whole.step, whole.updates, whole.moment_updates}),
                ElementsAre(9, 8, 7));
    EXPECT_EQ(whole.loss_scale.value, 512);
    EXPECT_EQ(whole.loss_scale.good, 5);
    EXPECT_EQ(run_of(imported, false, LossScale(true)).moment_updates, 0);
    EXPECT_EQ(run_of(imported, true, LossScale(false)).loss_scale.value, 1);
    EXPECT_EQ(run_of({.step = 9}, true, LossScale(true)).loss_scale.value, LossScale(true).value());
}

}  // namespace
}  // namespace ferry::train
