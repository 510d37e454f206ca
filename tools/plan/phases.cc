#include "phases.h"

#include <spdlog/fmt/fmt.h>

#include <nlohmann/json.hpp>

#include "ferry/units.h"
#include "prediction_report.h"
#include "train/setup/from_config.h"
#include "train/step/momentum_schedule.h"

namespace ferry::tools {

std::vector<Phase> phases_of(const Config& config, const planner::Plan& plan) {
    const auto steps = train::MomentumSchedule(config.optimizer).of_each(config.steps);
    std::vector<Phase> phases;
    for (size_t what = 0; what < steps.size(); ++what) {
        const auto exchanges = static_cast<zero::Exchanged>(what);
        if (steps[what] > 0)
            phases.push_back({.exchanges = exchanges,
                              .steps = steps[what],
                              .bytes = train::steady_bytes(plan, exchanges),
                              .seconds = {}});
    }
    return phases;
}

void predict(std::vector<Phase>& phases, double gradients, const Config& config,
             const train::Predictor& predictor, const planner::Plan& plan,
             const cost::Measurements& measured) {
    for (Phase& phase : phases)
        phase.seconds =
            phase.exchanges == zero::Exchanged::gradients
                ? gradients
                : predictor.predict(train::request_of(config), plan, measured, phase.exchanges)
                      .step_seconds;
}

std::optional<double> mean_seconds(const std::vector<Phase>& phases) {
    double seconds = 0;
    int64_t steps = 0;
    for (const Phase& phase : phases) {
        if (!phase.seconds) return std::nullopt;
        seconds += static_cast<double>(phase.steps) * *phase.seconds;
        steps += phase.steps;
    }
    return seconds / static_cast<double>(steps);
}

std::string text_of(const std::vector<Phase>& phases) {
    if (phases.size() < 2) return "";
    std::string text =
        fmt::format("  {:<18} {:>10} {:>14} {:>10}\n", "a step exchanges", "steps", "sent", "s");
    for (const Phase& phase : phases)
        text += fmt::format("  {:<18} {:>10} {:>14} {:>10}\n", train::name_of(phase.exchanges),
                            phase.steps,
                            format_bytes(phase.bytes.bytes[static_cast<size_t>(swap::Lane::comm)]),
                            phase.seconds ? fmt::format("{:.4f}", *phase.seconds) : "");
    if (const auto mean = mean_seconds(phases))
        text += fmt::format("  {:<18} {:>10} {:>14} {:>10.4f}\n", "mean of the run", "", "", *mean);
    return text +
           "  all else that is predicted, the timeline, what would make a step faster and the cost "
           "of a checkpoint among it, is of a step that exchanges gradients\n\n";
}

nlohmann::json to_json(const std::vector<Phase>& phases, int ranks) {
    nlohmann::json all = nlohmann::json::array();
    for (const Phase& phase : phases)
        all.push_back(
            {{"exchanges", train::name_of(phase.exchanges)},
             {"steps", phase.steps},
             {"bytes", lanes_json(phase.bytes, ranks)},
             {"seconds", phase.seconds ? nlohmann::json(*phase.seconds) : nlohmann::json()}});
    return all;
}

}  // namespace ferry::tools
