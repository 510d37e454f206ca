// The stages of a pipeline: which layers each has, and that none waits for another for ever.
#include "train/setup/stages.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <numeric>

#include "ferry/error.h"
#include "train/setup/model_of.h"
#include "train/setup/rank_share.h"
#include "train/step/schedules.h"
#include "train/step/step.h"
#include "zero/stage_order.h"

namespace ferry::train {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

constexpr int64_t kTokens = 16;

Config config_of(int64_t blocks, int stages, bool tied = false, int64_t vocab = 64) {
    Config config;
    config.model = {.hidden = 16,
                    .layers = blocks,
                    .heads = 2,
                    .kv_heads = 2,
                    .head_dim = 8,
                    .intermediate = 32,
                    .vocab = vocab,
                    .tie_embeddings = tied};
    config.batch = {.sequence = kTokens, .micro_batch = 1, .micro_batches = 1};
    config.parallel.pipeline = stages;
    return config;
}

std::vector<zero::Stage> cut(const Config& config) {
    const model::Shape shape = model_of(config).shape;
    return stages_of(config, shape, layers_of(config, shape, config.parallel.pipeline));
}

std::vector<int64_t> blocks_of(const Config& config) {
    const int64_t layers = config.model.layers + 2;
    std::vector<int64_t> found;
    int64_t behind = 0;
    for (const zero::Stage& stage : cut(config)) {
        EXPECT_EQ(stage.first, behind);
        behind = stage.end;
        found.push_back(std::min(stage.end, layers - 1) - std::max<int64_t>(stage.first, 1));
    }
    EXPECT_EQ(behind, layers);
    return found;
}

TEST(Stages, HaveAsMuchToComputeAsTheyCan) {
    EXPECT_THAT(blocks_of(config_of(8, 1)), ElementsAre(8));
    // The head counts little, and the last stage has it.
    EXPECT_THAT(blocks_of(config_of(8, 2)), ElementsAre(4, 4));
    const std::vector<int64_t> uneven = blocks_of(config_of(7, 3));
    EXPECT_EQ(std::accumulate(uneven.begin(), uneven.end(), int64_t{0}), 7);
    EXPECT_LE(std::ranges::max(uneven), 3);
    EXPECT_THAT(blocks_of(config_of(4, 4)), ElementsAre(1, 1, 1, 1));
}

// A head of ten blocks' products leaves its stage one of them; the embedding is no product.
TEST(Stages, CountTheHead) {
    for (const bool tied : {false, true}) {
        const std::vector<int64_t> blocks = blocks_of(config_of(8, 2, tied, 40'000));
        EXPECT_THAT(blocks, ElementsAre(7, 1)) << tied;
    }
}

TEST(Stages, KnowWhatTrainsBelowAndWhoHasATiedTable) {
    Config config = config_of(4, 3, true);
    config.freeze = {"*embed_tokens*", "*layers.0.*"};
    const auto frozen = cut(config);
    EXPECT_FALSE(frozen[0].trains_below);
    EXPECT_EQ(frozen[1].trains_below, frozen[0].end > 2);
    EXPECT_TRUE(frozen[2].trains_below);
    EXPECT_TRUE(frozen[0].gives_table());
    EXPECT_FALSE(frozen[1].tied);
    EXPECT_TRUE(frozen[2].copies_table());
    EXPECT_FALSE(cut(config_of(4, 3))[2].copies_table());
}

TEST(Stages, AreNoMoreThanBlocks) {
    try {
        cut(config_of(3, 4));
        FAIL() << "a stage without a block";
    } catch (const Error& error) {
        EXPECT_EQ(error.trouble(), Trouble::usage);
        EXPECT_EQ(error.problem().where, "parallel.pipeline");
        EXPECT_THAT(error.what(), HasSubstr("4 stages"));
        EXPECT_THAT(error.what(), HasSubstr("set it to 3 or less"));
    }
}

TEST(Stages, WaitForTheOthersAsTheorySays) {
    EXPECT_DOUBLE_EQ(bubble_of(1, 1, 4, 2), 0);
    EXPECT_DOUBLE_EQ(bubble_of(1, 2, 1, 3), 0.5);
    EXPECT_DOUBLE_EQ(bubble_of(6, 3, 1, 1), 0.25);
}

// A stage of one block passes each micro-batch on by itself, as if groups were of one; in a stage
// of several all but the last block see the whole group first.
TEST(Stages, WaitForMicroBatchesOfLargerGroups) {
    EXPECT_DOUBLE_EQ(bubble_of(2, 3, 3, 1), 0.25);
    EXPECT_DOUBLE_EQ(bubble_of(2, 2, 4, 2), 5.0 / 21);
    EXPECT_LT(bubble_of(2, 2, 4, 50), 1.0 / 3);
    EXPECT_NEAR(bubble_of(2, 2, 4, 50), 1.0 / 3, 0.01);
}

// A forward, a forward again, gradients of inputs and of weights: a fourth of a visit each.
TEST(Stages, WaitLessWhereWeightsGradientsFillIn) {
    EXPECT_DOUBLE_EQ(bubble_of(6, 3, 1, 1, true), 1.0 / 7);  // 2 x 2 of 6 x 4 + 2 x 2
    EXPECT_DOUBLE_EQ(bubble_of(8, 2, 1, 3, true), 1.0 / 17);
    EXPECT_DOUBLE_EQ(bubble_of(1, 2, 1, 3, true), 3.0 / 7);  // one group's fill nothing but its own
    EXPECT_DOUBLE_EQ(bubble_of(2, 2, 4, 1, true), 1.0 / 33);  // the first forward remains
    EXPECT_DOUBLE_EQ(bubble_of(2, 2, 4, 2, true), 7.0 / 71);
    EXPECT_DOUBLE_EQ(bubble_of(4, 1, 2, 2, true), 0);
}

// Every rank has every so many-th run of blocks; of several runs each waits for fewer.
TEST(Stages, HaveRunsOfBlocksInTurn) {
    Config config = config_of(9, 2, true);
    config.parallel.schedule = PipelineSchedule::interleaved;
    config.parallel.virtual_stages = 2;
    config.freeze = {"*embed_tokens*", "*layers.0.*", "*layers.1.*"};
    const auto stages = cut(config);
    ASSERT_EQ(stages.size(), 2);
    int64_t behind = 0;
    for (int64_t v = 0; v < 2; ++v) {
        for (const zero::Stage& stage : stages) {
            const zero::VirtualStage of = stage.virtual_stage(v);
            EXPECT_EQ(of.first, behind);
            EXPECT_EQ(of.trains_below, of.first > 3);
            behind = of.end;
            for (int64_t layer = 0; layer < 11; ++layer) {
                if (of.first <= layer && layer < of.end) {
                    EXPECT_EQ(stage_with(stages, layer), stage.index);
                }
            }
        }
    }
    EXPECT_EQ(behind, 11);
    EXPECT_TRUE(stages[0].gives_table());
    EXPECT_TRUE(stages[1].copies_table());
    config.parallel.virtual_stages = 5;
    try {
        cut(config);
        FAIL() << "a virtual stage without a block";
    } catch (const Error& error) {
        EXPECT_EQ(error.problem().where, "parallel.virtual_stages");
        EXPECT_THAT(error.what(), HasSubstr("2 stages with 5 each"));
        EXPECT_THAT(error.what(), HasSubstr("set it to 4 or less"));
    }
}

TEST(Stages, SayWhichRunsOfBlocksTheyHave) {
    Config config = config_of(8, 2);
    config.parallel.schedule = PipelineSchedule::round_robin;
    config.parallel.virtual_stages = 2;
    EXPECT_EQ(text_of(cut(config), 10),
              "embedding and blocks 0 to 1, 4 to 5; blocks 2 to 3, 6 to 7 and head");
}

TEST(Stages, WaitLessInSeveralVirtualStages) {
    EXPECT_DOUBLE_EQ(bubble_of(6, 3, 1, 2, false, 2), 1.0 / 7);  // 2 of 12 + 2
    EXPECT_DOUBLE_EQ(bubble_of(1, 3, 6, 2, false, 2), 1.0 / 7);  // one group, a block each
    EXPECT_DOUBLE_EQ(bubble_of(2, 4, 1, 2, false, 2), 5.0 / 9);  // the second round waits for two
}

// ---------------------------------------------------------------- their schedules

struct Pipeline {
    int stages;
    int64_t groups, size;
    bool tied;
    PipelineSchedule schedule = PipelineSchedule::one_f_one_b;
    int virtual_stages = 1;
};

std::vector<planner::Plan> plans_of(const Pipeline& of) {
    Config config = config_of(std::max(5, of.stages * of.virtual_stages + 1), of.stages, of.tied);
    config.parallel.schedule = of.schedule;
    config.parallel.virtual_stages = of.virtual_stages;
    const model::Shape shape = model_of(config).shape;
    const auto whole = layers_of(config, shape, of.stages);
    std::vector<planner::Plan> plans;
    for (const zero::Stage& stage : stages_of(config, shape, whole)) {
        planner::PlanRequest request;
        request.micro_batches = of.groups * of.size;
        request.swap = {.chunk_elements = 4096, .groups = of.groups};
        plans.push_back(planner::make_plan(
            request, zero::layers_of_stage(whole, stage), {.sequence = kTokens, .micro_batch = 1},
            {.activation = 1024, .scratch = 1 << 16, .deferred = 4096},
            cost::default_measurements(request.device),
            zero::partition_of(0, 0, 1, {}, {}, stage)));
    }
    return plans;
}

template <class Record>
std::string why_stopped(const std::vector<planner::Plan>& plans, const Record& record) {
    std::vector<std::vector<Passed>> passes;
    for (const planner::Plan& plan : plans) passes.push_back(passes_of(record(plan)));
    return why_stages_stop(passes);
}

// Fewer groups than stages, as many, and more; several micro-batches a group.
TEST(Stages, EndWhateverTheNumbersOfStagesAndGroups) {
    for (const int stages : {2, 3, 4, 5}) {
        for (const int64_t groups : {1, 2, 3, 4, 5, 6, 11}) {
            using enum PipelineSchedule;
            const int64_t size = groups % 2 + 1;
            for (const Pipeline& of :
                 {Pipeline{stages, groups, size, false}, Pipeline{stages, groups, size, true},
                  Pipeline{stages, groups, size, false, zero_bubble},
                  Pipeline{stages, groups, size, true, interleaved, 2},
                  Pipeline{stages, groups, size, true, interleaved, 3},
                  Pipeline{stages, groups, size, true, round_robin, 1},
                  Pipeline{stages, groups, size, true, round_robin, 3}}) {
                SCOPED_TRACE(testing::Message()
                             << stages << " stages, " << groups << " groups of " << of.size
                             << ", schedule " << static_cast<int>(of.schedule));
                const auto plans = plans_of(of);
                for (const Previous previous : {Previous::none, Previous::not_speculative}) {
                    EXPECT_EQ(why_stopped(plans,
                                          [&](const planner::Plan& plan) {
                                              return record_step(plan, previous, false);
                                          }),
                              "");
                    EXPECT_EQ(why_stopped(plans,
                                          [&](const planner::Plan& plan) {
                                              return record_drain(plan, previous);
                                          }),
                              "");
                }
                EXPECT_EQ(why_stopped(plans,
                                      [&](const planner::Plan& plan) {
                                          return record_evaluation(plan, of.size);
                                      }),
                          "");
            }
        }
    }
}

// Each group goes forward and back once in each block, and never more of them are under way than
// there are stages from here on.
TEST(Stages, HaveFewGroupsUnderWay) {
    for (const planner::Plan& plan : plans_of({3, 7, 2, false})) {
        const zero::Stage& stage = plan.partition.stage;
        const swap::Schedule step = record_step(plan, Previous::none, false);
        const int64_t block = std::max<int64_t>(stage.first, 1);
        int64_t under_way = 0, most = 0, forward = 0;
        for (const swap::Task& task : step.tasks) {
            if (task.verb != swap::Verb::kernel || task.layer != block) continue;
            const auto op = static_cast<cost::Op>(task.op);
            if (op == cost::Op::forward) ++forward, ++under_way;
            if (op == cost::Op::backward) --under_way;
            most = std::max(most, under_way);
        }
        EXPECT_EQ(forward, 14);
        EXPECT_EQ(under_way, 0);
        EXPECT_EQ(most, 2 * (3 - stage.index));
    }
}

// Groups go forward and back in order in each virtual stage, with as many under way as is said; and
// a step's buffers hold what the actions leave.
TEST(Stages, GoForwardAndBackInVirtualStages) {
    for (const bool round_robin : {false, true}) {
        for (const int stages : {2, 3, 4, 6}) {
            for (const int64_t each : {2, 3, 4}) {
                for (int64_t groups = 1; groups <= 14; ++groups) {
                    SCOPED_TRACE(testing::Message() << round_robin << ": " << stages << " stages, "
                                                    << each << " each, " << groups << " groups");
                    zero::Stage stage{.count = stages, .round_robin = round_robin};
                    stage.several.resize(static_cast<size_t>(each));
                    for (; stage.index < stages; ++stage.index) {
                        std::vector<int64_t> forward(static_cast<size_t>(each)), back = forward,
                                                                                 most = forward;
                        for (const zero::Action& action : zero::actions_of(stage, groups)) {
                            const auto v = static_cast<size_t>(action.virtual_stage);
                            using What = zero::Action::What;
                            if (action.what == What::forward) {
                                EXPECT_EQ(action.group, forward[v]++);
                            }
                            if (action.what == What::backward) {
                                EXPECT_EQ(action.group, back[v]++);
                            }
                            EXPECT_LE(back[v], forward[v]);
                            most[v] = std::max(most[v], forward[v] - back[v]);
                        }
                        EXPECT_THAT(back, testing::Each(groups));
                        EXPECT_EQ(most, stage.under_way_of_each(groups));
                    }
                }
            }
        }
    }
}

// Of each block and micro-batch backward leaves something once, which is done once behind it, in
// the micro-batches' order; and a stage never leaves more groups than there are stages before it.
TEST(Stages, LeaveFewGroupsWeightsGradients) {
    constexpr int64_t kSize = 2, kGroups = 7;
    for (const planner::Plan& plan :
         plans_of({3, kGroups, kSize, false, PipelineSchedule::zero_bubble})) {
        const zero::Stage& stage = plan.partition.stage;
        SCOPED_TRACE(testing::Message() << "stage " << stage.index);
        const swap::Schedule step = record_step(plan, Previous::none, false);
        for (int64_t block = std::max<int64_t>(stage.first, 1);
             block < std::min<int64_t>(stage.end, 6); ++block) {
            int64_t left = 0, most = 0, done = 0, passed = 0;
            for (const swap::Task& task : step.tasks) {
                const auto op = static_cast<cost::Op>(task.op);
                if (task.verb != swap::Verb::kernel) continue;
                if (op == cost::Op::pass_on && task.item == left + done - 1 &&
                    static_cast<cost::StageLink>(task.flags) == cost::StageLink::previous)
                    passed = std::max(passed, left);
                if (task.layer != block) continue;
                if (op == cost::Op::backward) {
                    EXPECT_NE(task.flags & cost::kDefers, 0);
                    ++left;
                }
                most = std::max(most, left);
                if (op != cost::Op::weight_gradients) continue;
                EXPECT_EQ(task.item, done % kSize);
                ++done;
                --left;
            }
            EXPECT_EQ(done, kGroups * kSize);
            EXPECT_EQ(left, 0);
            EXPECT_EQ(most, kSize * (stage.index + 1));
            // What goes back leaves before the gradients of the same group's weights.
            if (stage.index > 0) {
                EXPECT_EQ(passed, most);
            }
        }
    }
}

TEST(Stages, ThatWaitForEachOtherAreFound) {
    const auto plans = plans_of({2, 3, 1, false});
    std::vector<std::vector<Passed>> passes;
    for (const planner::Plan& plan : plans)
        passes.push_back(passes_of(record_step(plan, Previous::none, false)));
    ASSERT_EQ(why_stages_stop(passes), "");
    std::vector<std::vector<Passed>> turned = passes;
    std::swap(turned[0][0], turned[0][2]);
    EXPECT_THAT(why_stages_stop(turned), HasSubstr("stage 1 takes over layer"));
    turned = passes;
    turned[1].pop_back();
    EXPECT_THAT(why_stages_stop(turned), HasSubstr("stage 0 takes over layer"));
    turned = passes;
    turned[0][0].bytes += 1;
    EXPECT_THAT(why_stages_stop(turned), HasSubstr("stage 0 passes on layer"));
}

// ---------------------------------------------------------------- ranks of a mix

Config mix_of(int tensor, int sequence, int pipeline) {
    Config config;
    config.parallel = {.sequence = sequence, .tensor = tensor, .pipeline = pipeline};
    return config;
}

// Neighbours share tensors, then sequences, then state; stages are outermost.
TEST(Mix, RanksStandWhereTheirNumbersSay) {
    const World five = world_of(mix_of(2, 1, 2), 5, 8, 4);
    EXPECT_EQ(five.stage(), 1);
    EXPECT_EQ(five.slicing().rank, 1);
    EXPECT_EQ(five.replica(), 0);
    EXPECT_EQ(five.replicas(), 2);
    EXPECT_EQ(five.sharers(), 2);
    EXPECT_THAT(five.with_tensors(), ElementsAre(4, 5));
    EXPECT_THAT(five.with_slice(), ElementsAre(5, 7));
    EXPECT_EQ(five.at_stage(0), 1);
    const World twelve = world_of(mix_of(2, 2, 2), 12, 16, 16);
    EXPECT_EQ(twelve.part(), 0);
    EXPECT_EQ(twelve.replica(), 1);
    EXPECT_THAT(twelve.with_sequences(), ElementsAre(12, 14));
    EXPECT_THAT(twelve.with_slice(), ElementsAre(8, 10, 12, 14));
}

// One rank of the last stage and the first slice counts each token.
TEST(Mix, TokensAreCountedOnce) {
    for (const int ranks : {4, 8, 16}) {
        int counting = 0;
        for (int rank = 0; rank < ranks; ++rank)
            counting += world_of(mix_of(2, 1, 2), rank, ranks, ranks).counts_tokens();
        EXPECT_EQ(counting, ranks / 4);
    }
}

TEST(Mix, OfOtherRanksIsRefusedWithBothNumbers) {
    try {
        world_of(mix_of(2, 1, 2), 0, 6, 6);
        FAIL() << "it was not refused";
    } catch (const Error& error) {
        EXPECT_EQ(error.problem().where, "parallel.pipeline, parallel.tensor, parallel.sequence");
        EXPECT_THAT(error.problem().measured, HasSubstr("groups of 4, 6 ranks"));
        EXPECT_THAT(error.problem().remedy, HasSubstr("start 8 ranks"));
    }
}

// Numbers of ranks that a remedy names are none that the next group refuses.
TEST(Mix, RemedyIsAMultipleOfAllGroups) {
    for (const int ranks : {8, 9, 10}) {
        try {
            world_of(mix_of(2, 1, 3), 0, ranks, ranks);
            FAIL() << ranks << " were not refused";
        } catch (const Error& error) {
            EXPECT_THAT(error.problem().remedy, HasSubstr("start 12 ranks")) << ranks;
        }
    }
}

}  // namespace
}  // namespace ferry::train
