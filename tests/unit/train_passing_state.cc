// Updates wait with what goes back to storage until it was read, and with nothing else; no side
// waits for one that closed.
#include "train/state/passing_state.h"

#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <chrono>
#include <thread>
#include <vector>

#include "train/state/saving.h"

namespace ferry::train {
namespace {

using planner::Chunk;
using swap::Tier;

// Chunks of one layer, their states on these tiers; weights in host memory.
planner::Plan plan_of(const std::vector<Tier>& states) {
    planner::Plan plan;
    plan.layers.emplace_back();
    plan.layer_plans.push_back({.chunks = std::ssize(states)});
    for (const Tier home : states) {
        const auto state = static_cast<swap::ObjectId>(plan.objects.size());
        plan.objects.push_back({.home = home, .bytes = 64});
        plan.objects.push_back({.home = Tier::host, .bytes = 64});
        plan.chunks.push_back({.weight = state + 1, .state = state});
    }
    return plan;
}

class Bytes {
public:
    UpdatedChunks::UpdatedBytes place() { return {.state = state_, .weight = weight_}; }

private:
    std::array<std::byte, 64> state_{}, weight_{};
};

TEST(PassingState, WaitsWithWhatGoesBackToStorageAlone) {
    const planner::Plan plan = plan_of({Tier::host, Tier::nvme, Tier::nvme, Tier::host});
    EXPECT_TRUE(passes_by(plan));
    std::array<Bytes, 4> bytes;
    PassingState passing(plan);
    std::atomic<int> updated = 0;
    std::thread updates([&] {
        for (size_t c = 0; c < plan.chunks.size(); ++c) {
            passing.updated(plan.chunks[c], bytes[c].place());
            ++updated;
        }
        passing.end();
    });
    for (size_t c = 0; c < plan.chunks.size(); ++c) {
        const UpdatedChunks::UpdatedBytes place = passing.take(plan.chunks[c]);
        EXPECT_EQ(place.state.data(), bytes[c].place().state.data());
        if (plan.objects[plan.chunks[c].state].home == Tier::host) continue;
        EXPECT_EQ(updated, c);  // until the next one is taken
    }
    updates.join();
    EXPECT_EQ(updated, 4);
}

// A chunk that no reader asks for, as of padding alone, and a reader that has come to its end.
TEST(PassingState, LetsGoWhatNobodyReads) {
    const planner::Plan plan = plan_of({Tier::nvme, Tier::nvme, Tier::nvme});
    std::array<Bytes, 3> bytes;
    PassingState passing(plan);
    std::thread updates([&] {
        for (size_t c = 0; c < plan.chunks.size(); ++c)
            passing.updated(plan.chunks[c], bytes[c].place());
        passing.end();
    });
    EXPECT_EQ(passing.take(plan.chunks[1]).state.data(), bytes[1].place().state.data());
    passing.close();
    updates.join();
    EXPECT_THROW(passing.take(plan.chunks[2]), PassingState::Closed);
}

TEST(PassingState, OfWhatUpdatesDoNotBringThereIsNone) {
    EXPECT_FALSE(passes_by(plan_of({Tier::host, Tier::host})));    // nothing comes from storage
    EXPECT_FALSE(passes_by(plan_of({Tier::nvme, Tier::device})));  // the device updates it
    planner::Plan frozen = plan_of({Tier::nvme, Tier::host});
    frozen.chunks[1].trainable = false;
    EXPECT_TRUE(passes_by(frozen));
    frozen.objects[frozen.chunks[1].weight].home = Tier::nvme;
    EXPECT_FALSE(passes_by(frozen));
}

// What a rank has passes by, wherever its weights of the others' shards lie. Where ranks have
// slices, or momentum that they exchange, none reads its part alone.
TEST(PassingState, OfSeveralRanksEachHasItsPart) {
    planner::Plan shared = plan_of({Tier::nvme, Tier::host});
    shared.partition.ranks = 2;
    EXPECT_TRUE(passes_by(shared));
    shared.chunks[1].trainable = false;
    shared.chunks[1].replica = true;
    shared.objects[shared.chunks[1].weight].home = Tier::nvme;
    EXPECT_TRUE(passes_by(shared));
    planner::Plan kept = plan_of({Tier::host});
    kept.partition.ranks = 2;
    EXPECT_TRUE(reads_meanwhile(kept));
    for (planner::Plan* plan : {&shared, &kept}) {
        plan->partition.slices = 2;
        EXPECT_FALSE(passes_by(*plan));
        EXPECT_FALSE(reads_meanwhile(*plan));
    }
    kept.partition.slices = 1;
    kept.partition.codecs.momentum.kind = CodecKind::sign;
    EXPECT_FALSE(reads_meanwhile(kept));
}

// The updates' thread alone counts, whatever the reader waits for.
TEST(PassingState, CountsWhatUpdatesWait) {
    constexpr auto kLong = std::chrono::milliseconds(30);
    constexpr double kSeconds = 0.03;
    const planner::Plan plan = plan_of({Tier::host, Tier::nvme, Tier::host});
    std::array<Bytes, 3> bytes;
    PassingState passing(plan);
    std::thread updates([&] {
        for (size_t c = 0; c < plan.chunks.size(); ++c) {
            if (c == 0) std::this_thread::sleep_for(kLong);  // the reader waits
            passing.updated(plan.chunks[c], bytes[c].place());
        }
        passing.end();
    });
    passing.take(plan.chunks[0]);
    EXPECT_EQ(passing.held_back_seconds(), 0);
    passing.take(plan.chunks[1]);
    std::this_thread::sleep_for(kLong);  // as one that copies it
    passing.take(plan.chunks[2]);
    updates.join();
    EXPECT_GE(passing.held_back_seconds(), kSeconds / 2);
}

}  // namespace
}  // namespace ferry::train
