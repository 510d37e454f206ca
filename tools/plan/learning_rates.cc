#include "learning_rates.h"

#include <spdlog/fmt/fmt.h>

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "ferry/optim.h"
#include "tools/output/output.h"
#include "train/setup/from_config.h"

namespace ferry::tools {
namespace {

// At most about 25 steps: the first and the last, evenly spaced ones, and where the rate turns.
std::vector<int64_t> steps_shown(const Config& config, const optim::LrSchedule& schedule) {
    constexpr int64_t kLines = 24;
    const int64_t last = std::max<int64_t>(1, config.steps);
    std::vector<int64_t> steps{1};
    for (int64_t i = 1; i <= kLines; ++i) steps.push_back(std::max<int64_t>(1, last * i / kLines));
    std::vector<int64_t> turns{schedule.warmup_steps};
    if (schedule.kind == optim::Decay::wsd)
        turns.push_back(schedule.total_steps - schedule.decay_steps);
    for (const int64_t turn : turns) {
        if (turn >= 1 && turn <= last) steps.push_back(turn);
    }
    std::sort(steps.begin(), steps.end());
    steps.erase(std::unique(steps.begin(), steps.end()), steps.end());
    return steps;
}

// Every step of an ordinary run; of a long one every k-th, and the last.
std::vector<int64_t> steps_listed(int64_t last) {
    constexpr int64_t kMost = 10000;
    const int64_t every = last <= kMost ? 1 : last / (kMost - 1) + 1;
    std::vector<int64_t> steps;
    for (int64_t i = 0; i <= (last - 1) / every; ++i) steps.push_back(1 + i * every);
    if (steps.back() != last) steps.push_back(last);
    return steps;
}

}  // namespace

void print_learning_rates(const Config& config) {
    const optim::LrSchedule schedule = train::schedule_of(config);
    constexpr double kWidth = 50;
    print("learning rate, {} from {:g} over {} steps\n\n", optim::name_of(schedule.kind),
          schedule.peak, config.steps);
    print("  {:>9} {:>11}\n", "step", "lr");
    for (const int64_t step : steps_shown(config, schedule)) {
        const double lr = optim::learning_rate(schedule, step);
        const double part = schedule.peak > 0 ? lr / schedule.peak : 0;
        const auto bar = static_cast<size_t>(std::lround(kWidth * std::clamp(part, 0.0, 1.0)));
        print("  {:>9} {:>11.4e} {}\n", step, lr, std::string(bar, '#'));
    }
}

nlohmann::json learning_rates_json(const Config& config) {
    const optim::LrSchedule schedule = train::schedule_of(config);
    const std::vector<int64_t> steps = steps_listed(config.steps);
    nlohmann::json rates = nlohmann::json::array();
    for (const int64_t step : steps) rates.push_back(optim::learning_rate(schedule, step));
    return {{"kind", optim::name_of(schedule.kind)},
            {"peak", schedule.peak},
            {"step", steps},
            {"lr", rates}};
}

}  // namespace ferry::tools
