#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

#include "ferry/optim.h"
#include "train/measuring/measure.h"
#include "train/stack/memory_left.h"

namespace ferry::train {
namespace {

constexpr int64_t kChunk = 65536;

// As the smallest plan has them: one chunk's state and weights.
planner::Plan plan_of_one_chunk(const StateFormat& state, DType compute) {
    return {.chunk_elements = kChunk, .compute = compute, .wire = compute, .state = state};
}

Topology with_memory_left(int64_t bytes) {
    Topology machine = discover_topology();
    machine.memory_left_bytes = bytes;
    return machine;
}

cost::Measurements rates(const planner::Plan& plan, int64_t left_bytes,
                         std::span<std::byte> buffers) {
    const Topology machine = with_memory_left(left_bytes);
    NodeTeams teams(machine, 1);
    cost::Measurements found;
    set_updates(
        time_updates(teams, machine, optim::scalars_of({}, 1, 1.0), plan, kUnlimited, buffers),
        found);
    return found;
}

void expect_plausible(const cost::Measurements& found) {
    EXPECT_GT(found.dram_bytes_per_s, 0);
    EXPECT_GE(found.update_overhead_s, 0);
    EXPECT_GE(found.out_of_place, 1);
}

// A run that fills what the machine has left is measured on what it has already, in its bounds.
TEST(Updates, AreTimedOnThePlansBuffersWhereNoMemoryIsLeft) {
    for (const int64_t elements : {int64_t{4096}, kChunk}) {
        for (const bool split : {false, true}) {
            planner::Plan plan =
                plan_of_one_chunk({.split = split}, split ? DType::bf16 : DType::f32);
            plan.chunk_elements = elements;
            const int64_t bytes = plan.state.bytes(elements) + elements * size_of(plan.compute);
            std::vector<std::byte> memory(static_cast<size_t>(bytes + 4096), std::byte{0});
            const auto buffers = std::span(memory).first(static_cast<size_t>(bytes));
            expect_plausible(rates(plan, 0, buffers));
            EXPECT_EQ(std::ranges::count(std::span(memory).subspan(buffers.size()), std::byte{0}),
                      4096);
        }
    }
}

// No more than is left: the pool would refuse it.
TEST(Updates, TakeNoMoreThanIsLeft) {
    const planner::Plan plan = plan_of_one_chunk({}, DType::f32);
    std::vector<std::byte> buffers(size_t{64} * 1024, std::byte{1});
    expect_plausible(rates(plan, kMiB, buffers));
    EXPECT_EQ(std::ranges::count(buffers, std::byte{1}), std::ssize(buffers));  // left alone
}

// Memory that is there already comes first, and no more of it is gone over than says something.
TEST(Updates, AreTimedInTheMemoryThatIsGiven) {
    const planner::Plan plan = plan_of_one_chunk({}, DType::f32);
    const int64_t working = 2 * kChunk * (plan.state.bytes(kChunk) / kChunk + 8);
    std::vector<std::byte> memory(static_cast<size_t>(3 * working + 4096));
    std::ranges::fill(std::span(memory).last(4096), std::byte{1});
    const auto given = std::span(memory).first(static_cast<size_t>(3 * working));
    const Topology machine = with_memory_left(kGiB);
    NodeTeams teams(machine, 1);
    const UpdateRates found =
        time_updates(teams, machine, optim::scalars_of({}, 1, 1.0), plan, working, given);
    EXPECT_EQ(found.memory_bytes, working);
    EXPECT_EQ(std::ranges::count(std::span(memory).last(4096), std::byte{1}), 4096);
}

TEST(Updates, TakeNoMoreThanTheBudgetHasLeft) {
    const BudgetConfig budgets{.host_bytes = 8 * kMiB};
    const Topology machine = with_memory_left(kGiB);
    EXPECT_EQ(as_left_now(machine, left_of_budget(budgets, 5 * kMiB)).memory_left_bytes, 3 * kMiB);
    EXPECT_EQ(as_left_now(machine, left_of_budget(budgets, 9 * kMiB)).memory_left_bytes, 0);
    EXPECT_GT(as_left_now(machine, left_of_budget({}, kMiB)).memory_left_bytes, 0);
}

}  // namespace
}  // namespace ferry::train
