// Batches that a program feeds: the same rows as a token file's, for every rank and part.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <numeric>
#include <stdexcept>
#include <vector>

#include "data/fed_batches.h"
#include "ferry/error.h"

namespace ferry {
namespace {

using testing::HasSubstr;
using Numbers = std::vector<int32_t>;

constexpr int64_t kSequence = 8;

// Token t of sequence s of a step: every number once.
void count(int64_t step, std::span<int32_t> tokens, std::span<int32_t> targets) {
    std::iota(tokens.begin(), tokens.end(), static_cast<int32_t>(1000 * step));
    std::iota(targets.begin(), targets.end(), static_cast<int32_t>(1000 * step + 1));
}

FedBatches::Options options(FedBatches::Load load = count) {
    return {{.sequence = kSequence,
             .micro_batch = 2,
             .micro_batches = 3,
             .evaluation_micro_batches = 2,
             .vocab = 5000},
            std::move(load)};
}

struct Filled {
    Numbers tokens, targets;
    explicit Filled(size_t count) : tokens(count), targets(count) {}
    MicroBatch out() { return {.tokens = tokens, .targets = targets}; }
};

TEST(FedBatches, GiveEachRankAndPartItsRows) {
    for (const int ranks : {1, 2, 3}) {
        for (const int parts : {1, 2}) {
            for (int rank = 0; rank < ranks; ++rank) {
                for (int part = 0; part < parts; ++part) {
                    auto chosen = options();
                    chosen.rank = rank, chosen.ranks = ranks;
                    chosen.part = part, chosen.parts = parts;
                    FedBatches batches(chosen);
                    batches.load(2);
                    EXPECT_EQ(batches.count_targets(2), 2 * 3 * ranks * kSequence);
                    const int64_t length = kSequence / parts;
                    for (int64_t i = 0; i < 3; ++i) {
                        Filled filled(static_cast<size_t>(2 * length));
                        batches.fill(2, i, filled.out());
                        for (int64_t row = 0; row < 2; ++row) {
                            const int64_t first =
                                2000 + ((rank * 3 + i) * 2 + row) * kSequence + part * length;
                            for (int64_t t = 0; t < length; ++t) {
                                const auto at = static_cast<size_t>(row * length + t);
                                ASSERT_EQ(filled.tokens[at], first + t);
                                ASSERT_EQ(filled.targets[at], first + t + 1);
                            }
                        }
                    }
                }
            }
        }
    }
}

TEST(FedBatches, RepeatBehindTheEndOfAnEvaluationWithoutTargets) {
    FedBatches batches(options());
    batches.load(0);
    Filled last(2 * kSequence), beyond(2 * kSequence);
    batches.fill_evaluation(1, last.out());
    EXPECT_EQ(last.targets.front(), 2 * kSequence + 1);
    batches.fill_evaluation(2, beyond.out());
    EXPECT_EQ(beyond.tokens.front(), 0);
    EXPECT_EQ(beyond.targets, Numbers(2 * kSequence, -1));
}

TEST(FedBatches, StayWhenTheNextOnesCannotBeHad) {
    bool fails = false;
    int32_t first = 0;
    FedBatches batches(options([&](int64_t step, auto tokens, auto targets) {
        count(step, tokens, targets);
        tokens[0] = first;
        if (fails) throw std::runtime_error("of the program");
    }));
    batches.load(1);
    const uint64_t sum = batches.loaded_sum();
    fails = true;
    EXPECT_THROW(batches.load(2), std::runtime_error);
    fails = false;
    for (const int32_t wrong : {-1, 5000}) {
        first = wrong;
        try {
            batches.load(2);
            ADD_FAILURE() << "it was taken";
        } catch (const Error& error) {
            EXPECT_EQ(error.trouble(), Trouble::usage);
            EXPECT_THAT(error.what(), HasSubstr("step 2, sequence 0, position 0"));
        }
    }
    EXPECT_EQ(batches.loaded_sum(), sum);
    Filled filled(2 * kSequence);
    batches.fill(1, 0, filled.out());
    EXPECT_EQ(filled.tokens[1], 1001);
}

TEST(FedBatches, OfWhichNothingWasWrittenAreNone) {
    FedBatches batches(options([](int64_t, auto, auto) {}));
    EXPECT_THROW(batches.load(1), Error);
}

TEST(FedBatches, CountTargetsThatAreReal) {
    FedBatches batches(options([](int64_t step, auto tokens, auto targets) {
        count(step, tokens, targets);
        for (size_t i = 5; i < targets.size(); ++i) targets[i] = -1;
    }));
    batches.load(1);
    EXPECT_EQ(batches.count_targets(1), 5);
    FedBatches other(options());
    other.load(1);
    EXPECT_NE(batches.loaded_sum(), other.loaded_sum());
}

}  // namespace
}  // namespace ferry
