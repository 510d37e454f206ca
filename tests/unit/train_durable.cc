#include "durable.h"

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

}  // namespace
}  // namespace ferry::train
