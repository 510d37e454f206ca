#include "train/saving/durable.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace ferry::train {
namespace {

TEST(RunRecord, IsOfARunThatComesAsFar) {
    RunRecord written("a line\n", 10);
    const auto bytes = written.write({.step = 6, .updates = 5}, 1000);
    EXPECT_EQ(RunRecord("a line\n", 6).read(bytes).updates, 5);
    try {
        RunRecord("a line\n", 5).read(bytes);
        FAIL() << "a run of 5 steps went on after its sixth";
    } catch (const Error& error) {
        EXPECT_EQ(error.trouble(), Trouble::usage);
        EXPECT_EQ(error.problem().where, "steps");
        EXPECT_THAT(error.what(), testing::HasSubstr("set steps to 6 or more"));
    }
}

TEST(ResumedText, NamesTheStepsThatAreDoneAgain) {
    EXPECT_EQ(resumed_text(52, -1), "resumed after step 52");
    EXPECT_EQ(resumed_text(52, 51), "resumed after step 52");
    EXPECT_EQ(resumed_text(52, 52), "resumed after step 52");
    EXPECT_EQ(resumed_text(52, 53),
              "resumed after step 52; step 53 was committed but not durable and is done again");
    EXPECT_EQ(resumed_text(52, 54),
              "resumed after step 52; steps 53 to 54 were committed but not durable and are done "
              "again");
}

// A state is called good only while none of its bytes is known to be wrong.
TEST(ThrowAgainAt, SaysWhichStateIsGood) {
    using Wrong = swap::Store::Wrong;
    const auto said = [](Wrong wrong) -> std::string {
        try {
            try {
                throw Error(Trouble::io, {.what = "bytes are wrong"});
            } catch (...) {
                throw_again_at(
                    {.step = 8, .last_good = 7, .stores = true, .durable = true, .wrong = wrong});
            }
        } catch (const Error& error) {
            return error.what();
        }
    };
    EXPECT_THAT(said(Wrong::none), testing::HasSubstr("--resume goes on from the last durable"));
    EXPECT_THAT(said(Wrong::elsewhere),
                testing::HasSubstr("none of these bytes: --resume reads the others first"));
    EXPECT_THAT(said(Wrong::in_published), testing::HasSubstr("durable step has these bytes too"));
    EXPECT_THAT(said(Wrong::in_published), testing::Not(testing::HasSubstr("goes on from")));
}

}  // namespace
}  // namespace ferry::train
