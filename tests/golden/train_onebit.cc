// 100 steps of 1-bit Adam on two ranks beside PyTorch's: tests/golden/make_onebit_golden.py. The
// sign of a value near zero is chance, so that runs of different rounding part slowly: ferry's fp32
// run may be as far from the fp64 run as three times what PyTorch's own fp32 run is.
#include <gtest/gtest.h>

#include <cmath>
#include <filesystem>
#include <fstream>
#include <map>
#include <sstream>
#include <string>
#include <vector>

#include "ferry/train.h"
#include "tests/support/run_ranks.h"
#include "train/inside.h"

namespace ferry::train {
namespace {

const std::filesystem::path kFolder = FERRY_SOURCE_DIR "/tests/golden/onebit";

using Lines = std::map<std::string, std::vector<double>>;

Lines read() {
    Lines lines;
    std::ifstream text(kFolder / "run.txt");
    for (std::string line; std::getline(text, line);) {
        std::istringstream words(line);
        std::string kind;
        words >> kind;
        for (std::string word; words >> word;) lines[kind].push_back(std::stod(word));
    }
    return lines;
}

// The root of the mean square of the relative distances of steps [from, to).
double apart(const std::vector<double>& values, const std::vector<double>& exact, size_t from,
             size_t to) {
    double sum = 0;
    for (size_t i = from; i < to; ++i) sum += std::pow(values[i] / exact[i] - 1, 2);
    return std::sqrt(sum / static_cast<double>(to - from));
}

TEST(Onebit, FollowsPyTorchOnTwoRanks) {
    if (comm::ranks_launched() > 0) GTEST_SKIP() << "for ranks of this process";
    const Lines lines = read();
    ASSERT_EQ(lines.at("loss64").size(), 100u);
    Config config = load_config(kFolder / "run.json", {});
    config.data.tokens = FERRY_SOURCE_DIR "/tests/golden/train/tokens.bin";
    const auto frozen = static_cast<size_t>(config.optimizer.freeze_step);
    for (const int64_t stage : {0, 2}) {
        config.zero.stage = stage;
        std::vector<double> losses, norms;
        comm::on_run_ranks(2, [&](std::unique_ptr<comm::Communicator> others, Executor& executor) {
            const bool first = others->rank() == 0;
            const auto engine =
                Engine::make(config, with({.executor = &executor}, {.ranks = std::move(others)}));
            for (int64_t step = 0; step < config.steps; ++step) {
                const StepReport report = engine->step();
                if (!first) continue;
                losses.push_back(report.loss);
                norms.push_back(report.gradient_norm);
            }
        });
        for (const auto& [name, values] : {std::pair{"loss", losses}, {"norm", norms}}) {
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
