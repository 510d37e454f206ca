// 100 steps of 0/1 Adam on two ranks beside PyTorch's: tests/golden/make_zeroone_golden.py. The
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

const std::filesystem::path kFolder = FERRY_SOURCE_DIR "/tests/golden/zeroone";

using Lines = std::map<std::string, std::vector<double>>;

Lines read(const std::string& name) {
    Lines lines;
    std::ifstream text(kFolder / (name + ".txt"));
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

struct Followed {
    std::vector<double> losses, norms;
};

Followed run(const Config& config) {
    Followed found;
    comm::on_run_ranks(2, [&](std::unique_ptr<comm::Communicator> others, Executor& executor) {
        const bool first = others->rank() == 0;
        const auto engine =
            Engine::make(config, with({.executor = &executor}, {.ranks = std::move(others)}));
        for (int64_t step = 0; step < config.steps; ++step) {
            const StepReport report = engine->step();
            if (!first) continue;
            found.losses.push_back(report.loss);
            found.norms.push_back(report.gradient_norm);
        }
    });
    return found;
}

void expect_followed(const std::string& name, int64_t stage) {
    SCOPED_TRACE(name + ", stage " + std::to_string(stage));
    const Lines lines = read(name);
    ASSERT_EQ(lines.at("loss64").size(), 100u);
    Config config = load_config(kFolder / (name + ".json"), {});
    config.data.tokens = FERRY_SOURCE_DIR "/tests/golden/train/tokens.bin";
    config.zero.stage = stage;
    const auto in_full = static_cast<size_t>(config.optimizer.var_update_scaler) + 1;
    const Followed ours = run(config);
    for (const auto& [kind, values] :
         {std::pair{"loss", ours.losses}, std::pair{"norm", ours.norms}}) {
        const std::vector<double>& exact = lines.at(std::string(kind) + "64");
        const std::vector<double>& single = lines.at(std::string(kind) + "32");
        ASSERT_EQ(values.size(), exact.size());
        EXPECT_LT(apart(values, exact, 0, in_full), 1e-5) << kind << " of gradients in full";
        // The first signs, and what they were off by beside the second moment's next change.
        EXPECT_LT(apart(values, exact, in_full, in_full + 3), 1e-4) << kind;
        const double apart_by = apart(values, exact, 0, exact.size()),
                     theirs = apart(single, exact, 0, exact.size());
        EXPECT_LT(apart_by, 3 * theirs) << kind;
        testing::Test::RecordProperty(
            name + kind + std::to_string(stage),
            std::to_string(apart_by) + " beside " + std::to_string(theirs));
    }
}

TEST(Zeroone, FollowsPyTorchOnTwoRanks) {
    if (comm::ranks_launched() > 0) GTEST_SKIP() << "for ranks of this process";
    expect_followed("sharded", 0);
    expect_followed("sharded", 3);
}

TEST(Zeroone, FollowsPyTorchOnTwoRanksWithLocalSteps) {
    if (comm::ranks_launched() > 0) GTEST_SKIP() << "for ranks of this process";
    expect_followed("run", 0);
}

}  // namespace
}  // namespace ferry::train
