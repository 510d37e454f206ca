// What golden tests of momentum between ranks compare: a run's losses and norms, and PyTorch's.
#pragma once

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

using GoldenLines = std::map<std::string, std::vector<double>>;

// Numbers by the word that their line begins with.
inline GoldenLines read_golden_lines(const std::filesystem::path& file) {
    GoldenLines lines;
    std::ifstream text(file);
    for (std::string line; std::getline(text, line);) {
        std::istringstream words(line);
        std::string kind;
        words >> kind;
        for (std::string word; words >> word;) lines[kind].push_back(std::stod(word));
    }
    return lines;
}

// The root of the mean square of the relative distances of steps [from, to).
inline double apart(const std::vector<double>& values, const std::vector<double>& exact,
                    size_t from, size_t to) {
    double sum = 0;
    for (size_t i = from; i < to; ++i) sum += std::pow(values[i] / exact[i] - 1, 2);
    return std::sqrt(sum / static_cast<double>(to - from));
}

struct FollowedRun {
    std::vector<double> losses, norms;
};

// All steps of it on two ranks, as the first one tells them.
inline FollowedRun follow_run(const Config& config) {
    FollowedRun found;
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

}  // namespace ferry::train
