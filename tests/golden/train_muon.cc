// Muon's update of a matrix beside 50 steps of plain PyTorch: tests/golden/make_muon_golden.py.
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <map>
#include <sstream>
#include <string>
#include <vector>

#include "tests/support/hashed.h"
#include "train/kernels/muon.h"

namespace ferry::train {
namespace {

const std::filesystem::path kFolder = FERRY_SOURCE_DIR "/tests/golden/muon";
constexpr int64_t kSteps = 50;

struct Apart {
    double single = 0, theirs = 0;  // of PyTorch in fp32; of torch.optim.Muon
};

struct Golden {
    int64_t rows = 0, cols = 0;
    optim::Hyper hyper{.method = optim::Method::muon};
    OptimizerConfig config{.method = optim::Method::muon};
    std::map<int64_t, std::vector<float>> weights{};
    std::map<int64_t, Apart> apart{};
};

optim::AdjustLr adjust_from(const std::string& word) {
    if (word == "match_rms_adamw") return optim::AdjustLr::match_rms_adamw;
    return word == "original" ? optim::AdjustLr::original : optim::AdjustLr::spectral_unclamped;
}

void read_options(std::istream& line, Golden& golden) {
    for (std::string key, value; line >> key >> value;) {
        if (key == "adjust_lr") {
            golden.config.adjust_lr = adjust_from(value);
            continue;
        }
        const double number = std::stod(value);
        if (key == "rows") golden.rows = static_cast<int64_t>(number);
        if (key == "cols") golden.cols = static_cast<int64_t>(number);
        if (key == "lr") golden.hyper.lr = number;
        if (key == "momentum") golden.hyper.momentum = number;
        if (key == "nesterov") golden.hyper.nesterov = number != 0;
        if (key == "weight_decay") golden.hyper.weight_decay = number;
    }
}

Golden read(const std::string& name) {
    std::ifstream file(kFolder / (name + ".txt"));
    Golden golden;
    std::string text;
    std::getline(file, text);
    std::istringstream options(text);
    read_options(options, golden);
    while (std::getline(file, text)) {
        std::istringstream line(text);
        std::string kind, word;
        int64_t step = 0;
        line >> kind >> step;
        if (kind == "apart") {
            line >> golden.apart[step].single >> golden.apart[step].theirs;
            continue;
        }
        while (line >> word)
            golden.weights[step].push_back(
                std::bit_cast<float>(static_cast<uint32_t>(std::stoul(word, nullptr, 16))));
    }
    return golden;
}

double distance(const std::vector<float>& a, const std::vector<float>& b, int64_t count) {
    double sum = 0;
    for (size_t i = 0; i < static_cast<size_t>(count); ++i) sum += std::pow(double{a[i]} - b[i], 2);
    return std::sqrt(sum);
}

class MuonGolden : public testing::TestWithParam<const char*> {};

// As near to PyTorch in fp64 as PyTorch in fp32 is, give or take; a hundred times nearer than
// torch.optim.Muon, which rounds to bf16.
TEST_P(MuonGolden, FiftyStepsAreThoseOfPyTorch) {
    const Golden golden = read(GetParam());
    const int64_t used = golden.rows * golden.cols, count = round_up(used, optim::kLeaf);
    const auto size = static_cast<size_t>(count);
    std::vector<float> p(size), m(size), g(size), start(size);
    for (int64_t i = 0; i < used; ++i) start[static_cast<size_t>(i)] = hashed(0, i) * 0.125f;
    p = start;
    NodeTeams teams(*this_machine(), 2);
    std::vector<std::byte> workspace(static_cast<size_t>(
        planner::workspace_of(golden.rows, golden.cols, count, DType::f32).bytes()));
    Muon muon(golden.config, teams, workspace);
    for (int64_t step = 1; step <= kSteps; ++step) {
        for (int64_t i = 0; i < used; ++i)
            g[static_cast<size_t>(i)] = hashed(1000, i) * 0.5f + hashed(step, i);
        muon.update(golden.rows, golden.cols,
                    {.count = count,
                     .gradient = g.data(),
                     .p_in = p.data(),
                     .m_in = m.data(),
                     .p = p.data(),
                     .m = m.data()},
                    optim::scalars_of(golden.hyper, step, 1));
        if (!golden.weights.contains(step)) continue;
        const std::vector<float>& exact = golden.weights.at(step);
        const Apart& apart = golden.apart.at(step);
        const double ours = distance(p, exact, used) / distance(start, exact, used);
        EXPECT_LT(ours, 4 * apart.single + 1e-6) << "step " << step;
        EXPECT_LT(ours, apart.theirs / 100) << "step " << step;
        RecordProperty("step_" + std::to_string(step), std::to_string(ours));
    }
    for (size_t i = static_cast<size_t>(used); i < size; ++i) ASSERT_EQ(p[i], 0) << "padding";
}

INSTANTIATE_TEST_SUITE_P(all, MuonGolden, testing::Values("wide", "tall", "square", "unclamped"),
                         [](const auto& one) { return std::string(one.param); });

}  // namespace
}  // namespace ferry::train
