#include <gtest/gtest.h>

#include "ferry/planner.h"
#include "src/planner/chunks.h"
#include "src/planner/placement.h"

namespace ferry::planner {
namespace {

TEST(BetFraction, IsWhatForwardCannotHideAndBackwardCan) {
    EXPECT_EQ(bet_fraction(1, 3, 0.5), 0);
    EXPECT_EQ(bet_fraction(1, 3, 1), 0);
    EXPECT_DOUBLE_EQ(bet_fraction(1, 3, 2), 0.5);
    EXPECT_DOUBLE_EQ(bet_fraction(1, 3, 4), 0.75);
    EXPECT_DOUBLE_EQ(bet_fraction(1, 3, 12), 0.25);  // backward hides no more than itself
}

model::Layer layer(model::LayerKind kind, int64_t decayed, int64_t norms) {
    model::Layer made{.kind = kind};
    made.segments = {{0, decayed, true, true}, {decayed, norms, false, true}};
    made.elements = made.trainable_elements = decayed + norms;
    return made;
}

std::vector<model::Layer> three_blocks() {
    std::vector<model::Layer> layers{layer(model::LayerKind::embedding, 65536, 0)};
    for (int i = 0; i < 3; ++i) layers.push_back(layer(model::LayerKind::block, 196608, 4096));
    layers.push_back(layer(model::LayerKind::head, 65536, 4096));
    return layers;
}

Config small_config() {
    Config config;
    config.batch = {.sequence = 64, .micro_batch = 1, .micro_batches = 4};
    config.swap.chunk_elements = 65536;
    return config;
}

Plan plan_of(const Config& config, int64_t moments = 2) {
    return make_plan(config, three_blocks(), {.sequence = 64, .micro_batch = 1},
                     {.activation = 32768, .scratch = 1 << 20}, moments);
}

TEST(Chunks, NeverStraddleASegmentAndCoverEveryElementOnce) {
    const auto layers = three_blocks();
    std::vector<LayerPlan> plans(layers.size());
    const std::vector<Chunk> chunks = cut_chunks(layers, 65536, plans);
    for (size_t l = 0; l < layers.size(); ++l) {
        int64_t next = 0;
        for (int64_t c = plans[l].first_chunk; c < plans[l].first_chunk + plans[l].chunks; ++c) {
            const Chunk& chunk = chunks[static_cast<size_t>(c)];
            EXPECT_EQ(chunk.first, next);
            EXPECT_EQ(chunk.decays, chunk.first < layers[l].segments[1].offset ||
                                        layers[l].segments[1].count == 0);
            next += chunk.count;
        }
        EXPECT_EQ(next, layers[l].elements);
    }
}

TEST(Plan, KeepsEverythingInMemoryWhenNothingIsLimited) {
    const Plan plan = plan_of(small_config());
    EXPECT_EQ(plan.groups, 1);
    EXPECT_EQ(plan.nvme_bytes, 0);
    for (const LayerPlan& l : plan.layer_plans) EXPECT_TRUE(l.resident);
    for (const swap::Object& object : plan.objects) EXPECT_NE(object.home, swap::Tier::nvme);
}

// What a refused budget says would do, must do.
int64_t smallest_budget(Config config, int64_t BudgetConfig::*budget) {
    config.budgets.*budget = 1;
    try {
        plan_of(config);
    } catch (const Error& error) {
        EXPECT_EQ(error.trouble(), Trouble::does_not_fit);
        const std::string& text = error.problem().measured;
        return std::stoll(text.substr(text.find('(') + 1));
    }
    ADD_FAILURE() << "one byte is enough?";
    return 0;
}

TEST(Plan, TheSmallestBudgetItNamesWorksAndOneByteLessDoesNot) {
    for (const bool nvme : {false, true}) {
        for (int64_t BudgetConfig::*budget :
             {&BudgetConfig::device_bytes, &BudgetConfig::host_bytes}) {
            Config config = small_config();
            if (nvme) config.budgets.nvme = {{.path = "unused"}};
            const int64_t smallest = smallest_budget(config, budget);
            config.budgets.*budget = smallest;
            const Plan plan = plan_of(config);
            EXPECT_LE(budget == &BudgetConfig::device_bytes ? plan.device_bytes : plan.host_bytes,
                      smallest);
            config.budgets.*budget = smallest - 1;
            EXPECT_THROW(plan_of(config), Error);
        }
    }
}

TEST(Plan, StaysWithinEveryBudgetAndSpendsIt) {
    Config config = small_config();
    config.budgets.nvme = {{.path = "unused"}};
    const int64_t least = smallest_budget(config, &BudgetConfig::host_bytes);
    for (int64_t host = least; host < 20 * kMiB; host += 700 * kKiB) {
        config.budgets.host_bytes = host;
        const Plan plan = plan_of(config);
        EXPECT_LE(plan.host_bytes, host);
        // Nothing that would have fitted is left on NVMe.
        int64_t smallest_stored = kUnlimited;
        for (const Chunk& chunk : plan.chunks) {
            if (plan.objects[chunk.state].home == swap::Tier::nvme) {
                smallest_stored = std::min(smallest_stored, 3 * chunk.state_part_bytes());
            }
        }
        EXPECT_TRUE(smallest_stored == kUnlimited || plan.host_bytes + smallest_stored > host)
            << host;
    }
}

TEST(Plan, ResidencyGoesToTheEmbeddingAndTheFirstLayers) {
    Config config = small_config();
    const int64_t all = plan_of(config).device_bytes;
    for (int64_t device = all; device > all / 2; device -= 200 * kKiB) {
        config.budgets.device_bytes = device;
        const Plan plan = plan_of(config);
        EXPECT_LE(plan.device_bytes, device);
        for (size_t l = 1; l < plan.layer_plans.size(); ++l) {
            EXPECT_TRUE(plan.layer_plans[l - 1].resident || !plan.layer_plans[l].resident);
        }
    }
}

TEST(Plan, NvmeBudgetTooSmallSaysHowMuch) {
    Config config = small_config();
    config.budgets.nvme = {{.path = "unused", .size_bytes = 1 * kMiB}};
    config.budgets.host_bytes = smallest_budget(config, &BudgetConfig::host_bytes);
    try {
        plan_of(config);
        FAIL();
    } catch (const Error& error) {
        EXPECT_EQ(error.trouble(), Trouble::does_not_fit);
        EXPECT_EQ(error.problem().where, "budgets.nvme");
    }
}

// Four bytes a parameter for the master weight and for each moment: in memory, on NVMe and in the
// buffers between them.
TEST(Plan, TakesStateAsTheOptimizerKeepsIt) {
    Config in_memory = small_config(), stored = small_config();
    stored.budgets.nvme = {{.path = "disk"}};
    stored.swap.state_on_nvme = 1;
    for (const int64_t moments : {0, 1, 2}) {
        for (const Config& config : {in_memory, stored}) {
            const Plan plan = plan_of(config, moments);
            EXPECT_EQ(plan.state_parts, 1 + moments);
            EXPECT_EQ(plan.buffers[size_t(Class::stage)].bytes,
                      4 * (1 + moments) * plan.chunk_elements);
            int64_t bytes = 0;
            for (const Chunk& chunk : plan.chunks) bytes += plan.objects[chunk.state].bytes;
            EXPECT_EQ(bytes, 4 * (1 + moments) * plan.leaves * 4096);
        }
    }
    EXPECT_LT(plan_of(stored, 0).nvme_bytes, plan_of(stored, 1).nvme_bytes);
    EXPECT_LT(plan_of(in_memory, 1).host_bytes, plan_of(in_memory, 2).host_bytes);
}

// Beside a GPU, and where the budget says what is to spare, state in memory bets too: it then has two
// slots and is never updated in place.
TEST(Bets, StateInMemoryBetsWhereThereIsRoom) {
    Config config = small_config();
    config.device = "cuda";
    config.batch.micro_batches = 256;  // backward has time to hide updates
    const auto bets = [&] {
        const Plan plan = plan_of(config);
        int64_t count = 0;
        for (const Chunk& chunk : plan.chunks) {
            if (!chunk.trainable) continue;
            EXPECT_EQ(plan.objects[chunk.state].versioned, chunk.bets);
            count += chunk.bets;
        }
        EXPECT_EQ(plan.host_slots.slots, 2 * count);
        return count;
    };
    EXPECT_EQ(bets(), 0);  // unlimited: nobody said what is to spare
    config.budgets.host_bytes = kGiB;
    const int64_t most = bets();
    EXPECT_GT(most, 3);
    config.swap.bets = "off";
    EXPECT_EQ(bets(), 0);
    const int64_t in_place = plan_of(config).host_bytes;
    config.swap.bets = "auto";
    config.budgets.host_bytes = in_place + 2 * 65536 * 12;  // room for two second slots
    const int64_t few = bets();
    EXPECT_EQ(few, 2);
    config.budgets.host_bytes = in_place;
    EXPECT_EQ(bets(), 0);
    config.device = "cpu";
    config.budgets.host_bytes = kGiB;
    EXPECT_EQ(bets(), 0);
}

}  // namespace
}  // namespace ferry::planner
