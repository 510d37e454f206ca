// Whether a launcher started this process, by what launchers leave in the environment.
#include <gtest/gtest.h>

#include <cstdlib>
#include <map>
#include <string>

#include "launched.h"

namespace ferry::comm {
namespace {

// Nothing but these of the launchers' variables, until the test ends.
class Launchers : public testing::Test {
protected:
    Launchers() {
        for (const char* name :
             {"OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS",
              "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID"}) {
            if (const char* value = std::getenv(name)) before_[name] = value;
            unsetenv(name);
            names_.emplace_back(name);
        }
    }
    ~Launchers() override {
        for (const std::string& name : names_) unsetenv(name.c_str());
        for (const auto& [name, value] : before_) setenv(name.c_str(), value.c_str(), 1);
    }

private:
    std::vector<std::string> names_;
    std::map<std::string, std::string> before_;
};

TEST_F(Launchers, NoneIsThere) {
    EXPECT_FALSE(launched_as_rank());
    EXPECT_EQ(launched_ranks(), std::nullopt);
}

TEST_F(Launchers, EachSaysHowManyRanksItStarted) {
    for (const char* name : {"OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS"}) {
        setenv(name, "3", 1);
        EXPECT_EQ(launched_ranks(), 3) << name;
        EXPECT_TRUE(launched_as_rank()) << name;
        unsetenv(name);
    }
}

TEST_F(Launchers, OneRankIsAlone) {
    setenv("OMPI_COMM_WORLD_SIZE", "1", 1);
    EXPECT_EQ(launched_ranks(), 1);
    EXPECT_FALSE(launched_as_rank());
}

TEST_F(Launchers, MpirunInsideASlurmStepCounts) {
    setenv("SLURM_STEP_NUM_TASKS", "2", 1);  // one daemon a host
    setenv("OMPI_COMM_WORLD_SIZE", "16", 1);
    EXPECT_EQ(launched_ranks(), 16);
}

TEST_F(Launchers, TheSameOneSaysWhichRankThisIs) {
    EXPECT_EQ(launched_rank(), std::nullopt);
    setenv("SLURM_STEP_NUM_TASKS", "2", 1);
    EXPECT_EQ(launched_rank(), std::nullopt);
    setenv("SLURM_PROCID", "1", 1);
    EXPECT_EQ(launched_rank(), 1);
    setenv("OMPI_COMM_WORLD_SIZE", "16", 1);
    EXPECT_EQ(launched_rank(), std::nullopt);  // the step's number is its daemon's
    setenv("OMPI_COMM_WORLD_RANK", "9", 1);
    EXPECT_EQ(launched_rank(), 9);
    setenv("OMPI_COMM_WORLD_SIZE", "1", 1);
    EXPECT_EQ(launched_rank(), std::nullopt);
}

TEST_F(Launchers, ABatchScriptIsNoRank) {
    setenv("SLURM_NTASKS", "8", 1);  // of the job; the script itself runs once
    EXPECT_FALSE(launched_as_rank());
}

TEST_F(Launchers, NonsenseIsNoLauncher) {
    for (const char* text : {"", "two", "0", "-1", "3x"}) {
        setenv("OMPI_COMM_WORLD_SIZE", text, 1);
        EXPECT_FALSE(launched_as_rank()) << text;
    }
}

}  // namespace
}  // namespace ferry::comm
