#include "wear.h"

#include <spdlog/fmt/fmt.h>

#include <algorithm>

namespace ferry::tools {
namespace {

constexpr double kWorthAWarning = 0.1;  // of a drive's life in one run

int64_t bytes_on_nvme(const planner::Plan& plan) {
    int64_t bytes = 0;
    for (const planner::Chunk& chunk : plan.chunks) {
        for (const swap::ObjectId object : {chunk.weight, chunk.state}) {
            if (object != swap::kNoObject && plan.objects[object].home == swap::Tier::nvme)
                bytes += plan.objects[object].bytes;
        }
    }
    return bytes;
}

// Every step writes alike, but for the update, which the first one lacks and the end brings.
int64_t bytes_a_step(const std::vector<train::ScheduleBytes>& schedules) {
    constexpr auto kWrite = static_cast<size_t>(swap::Lane::write);
    for (const train::ScheduleBytes& schedule : schedules) {
        if (schedule.name == "after a step without bets") return schedule.bytes[kWrite];
    }
    bug("a plan has steady steps");
}

std::string terabytes(double bytes) {
    return bytes < 1e12 ? format_bytes(static_cast<int64_t>(bytes))
                        : fmt::format("{:.1f} TB", bytes * 1e-12);
}

std::vector<std::string> advice_on(const Config& config, const planner::Plan& plan,
                                   double worst_share) {
    std::vector<std::string> advice;
    const int64_t stored = bytes_on_nvme(plan);
    const double enough = 1 - kWorthAWarning / worst_share;
    if (stored > 0) {
        advice.push_back(fmt::format(
            "budgets.host + {}: so much less of the state on NVMe brings it down to {:.0f} %",
            format_bytes(static_cast<int64_t>(enough * static_cast<double>(stored))),
            100 * kWorthAWarning));
    }
    advice.push_back(fmt::format(
        "batch.micro_batches {} and half the steps: the same tokens with half the writes",
        2 * config.batch.micro_batches));
    if (config.precision == "bf16" && config.optimizer.master == "fp32")
        advice.emplace_back("optimizer.master \"split\": exact, and 2 B less of each parameter");
    if (config.optimizer.moments == "fp32")
        advice.emplace_back(
            "optimizer.moments \"bf16\": half of the moments' bytes, and some noise");
    if (config.budgets.nvme.size() == 1)
        advice.emplace_back("a second path in budgets.nvme: each drive takes a part of it");
    return advice;
}

}  // namespace

Wear wear_of(const Config& config, const planner::Plan& plan,
             const std::vector<train::ScheduleBytes>& schedules,
             const std::vector<double>& path_shares) {
    Wear wear{.step_bytes = bytes_a_step(schedules)};
    wear.run_bytes = static_cast<double>(plan.nvme_bytes + bytes_on_nvme(plan)) +
                     static_cast<double>(wear.step_bytes) * static_cast<double>(config.steps);
    const size_t paths = config.budgets.nvme.size();
    double worst = 0;
    for (size_t p = 0; p < paths && plan.nvme_bytes > 0; ++p) {
        const NvmePath& path = config.budgets.nvme[p];
        const double part = path_shares.empty() ? 1 / static_cast<double>(paths) : path_shares[p];
        PathWear& one = wear.paths.emplace_back(PathWear{path.path, part * wear.run_bytes, 0});
        if (path.endurance_tbw > 0) one.share = one.run_bytes / (path.endurance_tbw * 1e12);
        worst = std::max(worst, one.share);
    }
    if (worst > kWorthAWarning) wear.advice = advice_on(config, plan, worst);
    return wear;
}

std::string text_of(const Wear& wear, const Config& config) {
    if (wear.paths.empty()) return {};
    std::string out =
        fmt::format("NVMe wear: {} written a step, {} in {} steps with the layout\n",
                    format_bytes(wear.step_bytes), terabytes(wear.run_bytes), config.steps);
    for (const PathWear& path : wear.paths) {
        out += fmt::format("  {}: {}", path.path, terabytes(path.run_bytes));
        out += path.share > 0 ? fmt::format(", {:.2g} % of its rated life\n", 100 * path.share)
                              : " (endurance_tbw is not given)\n";
    }
    if (wear.advice.empty()) return out;
    out += fmt::format("  warning: more than {:.0f} % of a drive's life. What lowers it:\n",
                       100 * kWorthAWarning);
    for (const std::string& line : wear.advice) out += "    " + line + "\n";
    return out;
}

nlohmann::json to_json(const Wear& wear) {
    nlohmann::json paths = nlohmann::json::array();
    for (const PathWear& path : wear.paths) {
        paths.push_back({{"path", path.path}, {"run_bytes", path.run_bytes}});
        if (path.share > 0) paths.back()["endurance_share"] = path.share;
    }
    return {{"step_bytes", wear.step_bytes},
            {"run_bytes", wear.run_bytes},
            {"paths", paths},
            {"advice", wear.advice}};
}

}  // namespace ferry::tools
