// What is read ahead arrives in order and whole, and an error arrives in its place.
#include "train/state/read_ahead.h"

#include <gtest/gtest.h>

#include <numeric>
#include <stdexcept>

#include "ferry/units.h"

namespace ferry::train {
namespace {

const std::vector<int64_t> kCounts{1, 5 * kMiB + 3, 0, 7, 2 * kMiB, 40 * kMiB};

float value_of(size_t tensor, int64_t element) {
    return static_cast<float>((element * 31 + static_cast<int64_t>(tensor)) % 65521);
}

void fill(size_t tensor, int64_t first, std::span<float> values) {
    for (size_t i = 0; i < values.size(); ++i)
        values[i] = value_of(tensor, first + static_cast<int64_t>(i));
}

TEST(ReadAhead, GivesEveryTensorInOrder) {
    ReadAhead ahead(kCounts, fill);
    for (size_t i = 0; i < kCounts.size(); ++i) {
        int64_t at = 0, wrong = 0;
        ahead.give(i, [&](std::span<const float> values) {
            for (const float value : values) wrong += value != value_of(i, at++);
        });
        EXPECT_EQ(at, kCounts[i]);
        EXPECT_EQ(wrong, 0);
    }
}

TEST(ReadAhead, GivesWhatCameBeforeAnErrorAndThenTheError) {
    ReadAhead ahead(kCounts, [](size_t tensor, int64_t first, std::span<float> values) {
        if (tensor == 3) throw std::runtime_error("damaged");
        fill(tensor, first, values);
    });
    int64_t given = 0;
    const auto count = [&](std::span<const float> values) { given += std::ssize(values); };
    for (size_t i = 0; i < 3; ++i) ahead.give(i, count);
    EXPECT_EQ(given, kCounts[0] + kCounts[1]);
    EXPECT_THROW(ahead.give(3, count), std::runtime_error);
    EXPECT_THROW(ahead.give(4, count), std::runtime_error);
}

TEST(ReadAhead, EndsWhenNobodyTakesMore) {
    int64_t read = 0;
    {
        ReadAhead ahead(
            kCounts, [&](size_t, int64_t, std::span<float> values) { read += std::ssize(values); });
        EXPECT_THROW(
            ahead.give(0, [](std::span<const float>) { throw std::runtime_error("full"); }),
            std::runtime_error);
    }
    EXPECT_LT(read, std::accumulate(kCounts.begin(), kCounts.end(), int64_t{0}));
}

}  // namespace
}  // namespace ferry::train
