// 100 steps of 1-bit Adam on two ranks beside PyTorch's: tests/golden/make_onebit_golden.py. The
// sign of a value near zero is chance, so that runs of different rounding part slowly: ferry's fp32
// run may be as far from the fp64 run as three times what PyTorch's own fp32 run is.
#include <gtest/gtest.h>

#include <filesystem>
#include <string>
#include <utility>
#include <vector>

#include "tests/support/followed_run.h"

namespace ferry::train {
namespace {

const std::filesystem::path kFolder = FERRY_SOURCE_DIR "/tests/golden/onebit";

TEST(Onebit, FollowsPyTorchOnTwoRanks) {
    if (comm::ranks_launched() > 0) GTEST_SKIP() << "for ranks of this process";
    const GoldenLines lines = read_golden_lines(kFolder / "run.txt");
    ASSERT_EQ(lines.at("loss64").size(), 100u);
    Config config = load_config(kFolder / "run.json", {});
    config.data.tokens = FERRY_SOURCE_DIR "/tests/golden/train/tokens.bin";
    const auto frozen = static_cast<size_t>(config.optimizer.freeze_step);
    for (const int64_t stage : {0, 2}) {
        config.zero.stage = stage;
        const FollowedRun found = follow_run(config);
        for (const auto& [name, values] :
             {std::pair{"loss", found.losses}, {"norm", found.norms}}) {
            const std::vector<double>& exact = lines.at(std::string(name) + "64");
            const std::vector<double>& single = lines.at(std::string(name) + "32");
            ASSERT_EQ(values.size(), exact.size());
            EXPECT_LT(apart(values, exact, 0, frozen), 1e-5) << name << " before it stays";
            // Two steps: the first moments that were sent, and what they were off by.
            EXPECT_LT(apart(values, exact, frozen, frozen + 2), 1e-4) << name;
            const double ours = apart(values, exact, 0, exact.size()),
                         theirs = apart(single, exact, 0, exact.size());
            EXPECT_LT(ours, 3 * theirs) << name << ", stage " << stage;
            RecordProperty(std::string(name) + std::to_string(stage),
                           std::to_string(ours) + " beside " + std::to_string(theirs));
        }
    }
}

}  // namespace
}  // namespace ferry::train
