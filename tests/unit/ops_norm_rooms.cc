// Which form of a norm's backward pass a GPU has shared memory for.
#include <gtest/gtest.h>

#include <utility>

#include "ops/cuda/norms/norm_plan.h"

namespace ferry::ops::cuda {
namespace {

constexpr int64_t kVolta = 96 * kKiB, kAmpereOfDesks = 99 * kKiB, kHopper = 227 * kKiB;

TEST(NormRooms, wide_rows_of_bf16_go_without_the_form_that_volta_has_no_room_for) {
    EXPECT_FALSE(whole_form_fits(256, 4, kVolta));
    EXPECT_FALSE(whole_form_fits(256, 4, whole_room(256, 4)));  // sums lie beside it
    EXPECT_TRUE(whole_form_fits(256, 4, kAmpereOfDesks));
    EXPECT_TRUE(whole_form_fits(256, 4, kHopper));
    for (const auto& [row, held] :
         {std::pair{32, 3}, {32, 4}, {64, 3}, {64, 4}, {128, 3}, {128, 4}})
        EXPECT_TRUE(whole_form_fits(row, held, kVolta)) << row << ", " << held;
}

TEST(NormRooms, all_gpus_have_room_for_the_form_that_is_left) {
    const auto fits = [](int64_t room) { return room + 2 * kKiB <= kLeastOptIn; };
    EXPECT_EQ(kLeastOptIn, kVolta);
    EXPECT_TRUE(fits(Summing<8, 2, Lie::whole>::room(true)));
    EXPECT_TRUE(fits(Summing<256, 4, Lie::whole>::room(true)));
    EXPECT_TRUE(fits(Summing<256, 4, Lie::halves>::room(true)));
    EXPECT_TRUE(fits(Summing<256, 2, Lie::any>::room(true)));
    EXPECT_TRUE(fits(Summing<256, 4, Lie::any>::room(true)));
}

// Blocks that are at work together, whose shared memory is one multiprocessor's.
TEST(NormRooms, a_multiprocessor_of_hopper_has_room_for_all_blocks_that_registers_leave) {
    constexpr int64_t kOfAll = 228 * kKiB, kOfBlock = 3 * kKiB;  // static, and the GPU's own
    for (const auto& [row, held] :
         {std::pair{32, 3}, {32, 4}, {64, 3}, {64, 4}, {128, 3}, {128, 4}, {256, 4}}) {
        const int64_t blocks = resident(held, Lie::whole) / block_of(row);
        EXPECT_LE(blocks * (whole_room(row, held) + kOfBlock), kOfAll) << row << ", " << held;
    }
}

}  // namespace
}  // namespace ferry::ops::cuda
