#include "wear.h"

#include <spdlog/fmt/fmt.h>

#include <algorithm>
#include <array>
#include <nlohmann/json.hpp>
#include <optional>

#include "base/text.h"
#include "cost/drives.h"
#include "ferry/aio.h"
#include "train/setup/from_config.h"
#include "train/step/momentum_schedule.h"
#include "what_if.h"

namespace ferry::tools {
namespace {

constexpr double kWorthAWarning = 0.1;  // part of a drive's life that one run uses

std::string terabytes(double bytes) {
    return bytes < 1e12 ? format_bytes(static_cast<int64_t>(bytes))
                        : fmt::format("{:.1f} TB", bytes * 1e-12);
}

// Two digits of a small share, and none of a large one in powers of ten.
std::string percent(double share) {
    const double value = 100 * share;
    return value < 10 ? fmt::format("{:.2g} %", value) : fmt::format("{:.0f} %", value);
}

// Clipping takes them, and gradients that are not finite where such a step is skipped.
bool can_roll_back(const Config& config) {
    return config.clip_norm > 0 || config.precision == DType::f16 ||
           config.on_nonfinite == OnNonfinite::skip;
}

// A run as it would be.
struct Supposed {
    planner::PlanRequest request{};
    int64_t steps = 0;
    bool can_roll_back = false;
    OptimizerConfig optimizer{};
};

// Every step writes alike, but for the update, which the first one lacks and the end brings, and
// for speculative updates that were rolled back. Where momentum is exchanged: the mean of the
// steps.
int64_t written_a_step(const Supposed& run, const planner::Plan& plan) {
    constexpr auto kWrite = static_cast<size_t>(swap::Lane::write);
    if (!plan.has_feedback()) return train::steady_bytes(plan).bytes[kWrite];
    const auto steps = train::MomentumSchedule(run.optimizer).of_each(run.steps);
    double all = 0;
    for (size_t what = 0; what < steps.size(); ++what) {
        if (steps[what] == 0) continue;
        const auto exchanged = static_cast<zero::Exchanged>(what);
        all += static_cast<double>(steps[what]) *
               static_cast<double>(train::steady_bytes(plan, exchanged).bytes[kWrite]);
    }
    return static_cast<int64_t>(all / static_cast<double>(run.steps));
}

Wear wear_without_advice(const Supposed& run, const planner::Plan& plan, int ranks,
                         const std::vector<double>& path_rates) {
    Wear wear{.ranks = ranks};
    const std::vector<NvmePath>& nvme = run.request.budgets.nvme;
    const size_t paths = nvme.size();
    if (plan.nvme_bytes == 0) return wear;
    constexpr auto kWrite = static_cast<size_t>(swap::Lane::write);
    wear.step_bytes = ranks * written_a_step(run, plan);
    if (plan.speculative && run.can_roll_back) {
        for (const train::ScheduleBytes& schedule : train::schedule_bytes(plan))
            if (schedule.exchanged == zero::Exchanged::gradients)  // the others never speculate
                wear.rolled_back_step_bytes =
                    std::max(wear.rolled_back_step_bytes, ranks * schedule.bytes[kWrite]);
        wear.counts_on_rollback = run.request.swap.speculate == Speculate::all && run.request.clips;
    }
    constexpr int64_t kBlock = 4096;
    const int64_t map = plan.durable ? round_up(plan.record_bytes + kBlock, kBlock) : 0;
    wear.step_note_bytes = ranks * (static_cast<int64_t>(paths) * aio::kHeaderBytes + map);
    const auto run_of = [&](int64_t step_bytes) {
        return static_cast<double>(ranks * plan.nvme_bytes) +
               static_cast<double>(step_bytes + wear.step_note_bytes) *
                   static_cast<double>(run.steps);
    };
    wear.run_bytes = run_of(wear.step_bytes);
    if (wear.rolled_back_step_bytes > 0)
        wear.rolled_back_run_bytes = run_of(wear.rolled_back_step_bytes);
    std::vector<int64_t> sizes;
    sizes.reserve(nvme.size());
    for (const NvmePath& path : nvme) sizes.push_back(path.size_bytes);
    const std::vector<double> shares =
        cost::path_shares(sizes, path_rates, ranks * plan.nvme_bytes);
    for (size_t p = 0; p < paths; ++p) {
        const NvmePath& path = nvme[p];
        const double part = shares[p];
        PathWear one{.path = path.path,
                     .run_bytes = part * wear.run_bytes,
                     .rolled_back_run_bytes = part * wear.rolled_back_run_bytes};
        if (path.endurance_tbw > 0) {
            one.share = one.run_bytes / (path.endurance_tbw * 1e12);
            one.rolled_back_share = one.rolled_back_run_bytes / (path.endurance_tbw * 1e12);
        }
        wear.paths.push_back(std::move(one));
    }
    return wear;
}

double worst_share(const Wear& wear) {
    double worst = 0;
    for (const PathWear& path : wear.paths)
        worst = std::max(worst, wear.counts_on_rollback ? path.rolled_back_share : path.share);
    return worst;
}

// Plans again with each change: what else it moves, it moves there too.
class Adviser {
public:
    Adviser(const Supposed& run, const Config& config, const train::Predictor& predictor,
            const planner::Plan& plan, int ranks, const std::vector<double>& path_rates,
            double share)
        : run_(run),
          config_(config),
          predictor_(predictor),
          plan_(plan),
          ranks_(ranks),
          path_rates_(path_rates),
          share_(share) {}

    std::vector<WearAdvice> ask() {
        more_host_memory();
        if (run_.request.swap.state_on_nvme.value_or(0) > 0)
            offer({{"swap.state_on_nvme", "auto"}}, "what the host budget asks",
                  [](Supposed& s) { s.request.swap.state_on_nvme.reset(); });
        if (run_.request.swap.speculate == Speculate::all)
            offer({{"swap.speculate", "auto"}}, "none where clipping would take them",
                  [](Supposed& s) { s.request.swap.speculate = Speculate::automatic; });
        if (run_.request.durable)
            offer({{"checkpoint.durable_steps", "false"}}, "a killed run starts again",
                  [](Supposed& s) { s.request.durable = false; });
        const int64_t micro_batches = 2 * run_.request.micro_batches;
        const int64_t steps = ceil_div(run_.steps, int64_t{2});
        offer({{"batch.micro_batches", std::to_string(micro_batches)},
               {"steps", std::to_string(steps)}},
              "the same tokens", [&](Supposed& s) {
                  s.request.micro_batches = micro_batches;
                  s.steps = steps;
              });
        if (may_split(config_))
            offer({{"optimizer.master", "split"}},
                  config_.precision == DType::bf16 ? "exact, 2 B less of each parameter"
                                                   : "within 2^-39, 2 B less of each parameter",
                  [](Supposed& s) { s.request.state.split = true; });
        offer({{"optimizer.moments", "bf16"}}, "half of the moments' bytes, and some noise",
              [](Supposed& s) { s.request.state.moment_type = MomentType::bf16; });
        if (may_code(config_))
            offer({{"optimizer.moments", "int8"}}, "8-bit codes, as AdamW8bit keeps them",
                  [](Supposed& s) { s.request.state.moment_type = MomentType::int8; });
        if (run_.request.budgets.nvme.size() == 1)
            offer({}, "a second path like it in budgets.nvme", [](Supposed& s) {
                std::vector<NvmePath>& nvme = s.request.budgets.nvme;
                nvme.push_back(nvme.front());
                nvme.back().path += " (second)";
            });
        return std::move(advice_);
    }

private:
    // None: that cannot be planned.
    std::optional<double> share_with(const Supposed& run) const {
        const bool same_paths = run.request.budgets.nvme.size() == path_rates_.size();
        try {
            return worst_share(
                wear_without_advice(run, predictor_.plan(run.request), ranks_,
                                    same_paths ? path_rates_ : std::vector<double>{}));
        } catch (const Error&) {
            return std::nullopt;
        }
    }
    bool lowers(double share) const {
        constexpr double kNoticeably = 0.98;
        return share < kNoticeably * share_;
    }

    template <class Change>
    void offer(std::vector<std::pair<std::string, std::string>> set, std::string note,
               const Change& change) {
        Supposed changed = run_;
        change(changed);
        const auto share = share_with(changed);
        if (share && lowers(*share)) advice_.push_back({std::move(set), std::move(note), *share});
    }

    // The smallest that brings it down to a tenth, or as far as memory can.
    void more_host_memory() {
        if (run_.request.budgets.host_bytes == kUnlimited) return;
        const auto with = [&](int64_t bytes) {
            Supposed run = run_;
            run.request.budgets.host_bytes = bytes;
            return share_with(run);
        };
        int64_t too_little = run_.request.budgets.host_bytes;
        int64_t enough = round_up(too_little + int64_t{2} * ranks_ * plan_.nvme_bytes, kMiB);
        const std::optional<double> least = with(enough);
        if (!least || !lowers(*least)) return;
        double share = *least;
        constexpr double kAlmost = 1.01;
        const double wanted = std::max(kWorthAWarning, kAlmost * share);
        while (enough - too_little > std::max(kMiB, too_little / 64)) {
            const int64_t middle = round_up(too_little + (enough - too_little) / 2, kMiB);
            if (middle >= enough) break;
            const auto found = with(middle);
            const bool reaches = found && *found <= wanted;
            (reaches ? enough : too_little) = middle;
            if (reaches) share = *found;
        }
        advice_.push_back({{{"budgets.host", std::to_string(enough / kMiB) + "MiB"}}, "", share});
    }

    const Supposed run_;
    const Config& config_;
    const train::Predictor& predictor_;
    const planner::Plan& plan_;
    const int ranks_;
    const std::vector<double>& path_rates_;
    const double share_;  // that the most worn drive loses as it is
    std::vector<WearAdvice> advice_{};
};

std::string text_of(const WearAdvice& advice) {
    std::string text;
    for (const auto& [key, value] : advice.set)
        text += fmt::format("{}{} {}", text.empty() ? "" : " and ", key, value);
    const bool both = !text.empty() && !advice.note.empty();
    text += both ? " (" + advice.note + ")" : advice.note;
    return fmt::format("{}: {}", text, percent(advice.share));
}

}  // namespace

Wear wear_of(const Config& config, const train::Predictor& predictor, const planner::Plan& plan,
             const train::RankCount& count, const std::vector<double>& path_rates) {
    const Supposed run{train::request_of(config), config.steps, can_roll_back(config),
                       config.optimizer};
    Wear wear = wear_without_advice(run, plan, count.on_a_host, path_rates);
    const double share = worst_share(wear);
    if (share > kWorthAWarning)
        wear.advice =
            Adviser(run, config, predictor, plan, count.on_a_host, path_rates, share).ask();
    return wear;
}

std::string text_of(const Wear& wear, const Config& config) {
    if (wear.paths.empty()) return {};
    std::string out = fmt::format(
        "NVMe wear{}: {} written a step, {} in {} steps with the layout, and some 20 MiB when a "
        "path is tried out\n",
        wear.ranks > 1 ? fmt::format(" by the {} ranks of a host", wear.ranks) : "",
        format_bytes(wear.step_bytes + wear.step_note_bytes), terabytes(wear.run_bytes),
        config.steps);
    if (wear.rolled_back_step_bytes > wear.step_bytes)
        out += fmt::format(
            "  up to {} a step where speculative updates are rolled back, {} in all{}\n",
            format_bytes(wear.rolled_back_step_bytes + wear.step_note_bytes),
            terabytes(wear.rolled_back_run_bytes),
            wear.counts_on_rollback ? ": clipping rolls them back (swap.speculate \"all\")" : "");
    for (const PathWear& path : wear.paths) {
        out += fmt::format("  {}: {}", one_line(path.path), terabytes(path.run_bytes));
        if (path.share <= 0) {
            out += " (endurance_tbw is not given)\n";
            continue;
        }
        out += fmt::format(", {} of its rated life", percent(path.share));
        if (path.rolled_back_share > path.share)
            out += fmt::format(", {} where speculative updates are rolled back",
                               percent(path.rolled_back_share));
        out += "\n";
    }
    if (worst_share(wear) <= kWorthAWarning) return out;
    out += fmt::format("  warning: more than {:.0f} % of a drive's life. Planned again{}\n",
                       100 * kWorthAWarning, wear.advice.empty() ? ", nothing lowers it" : " with");
    for (const WearAdvice& advice : wear.advice) out += "    " + text_of(advice) + "\n";
    return out;
}

nlohmann::json to_json(const Wear& wear) {
    nlohmann::json paths = nlohmann::json::array(), all = paths;
    for (const PathWear& path : wear.paths) {
        paths.push_back({{"path", path.path}, {"run_bytes", path.run_bytes}});
        if (path.share > 0) paths.back()["endurance_share"] = path.share;
        if (path.rolled_back_share > 0)
            paths.back()["endurance_share_rolled_back"] = path.rolled_back_share;
    }
    for (const WearAdvice& advice : wear.advice) {
        nlohmann::json set = nlohmann::json::object();
        for (const auto& [key, value] : advice.set) set[key] = value;
        all.push_back({{"set", set}, {"note", advice.note}, {"endurance_share", advice.share}});
    }
    return {{"ranks", wear.ranks},
            {"step_bytes", wear.step_bytes},
            {"step_note_bytes", wear.step_note_bytes},
            {"run_bytes", wear.run_bytes},
            {"step_bytes_rolled_back", wear.rolled_back_step_bytes},
            {"run_bytes_rolled_back", wear.rolled_back_run_bytes},
            {"paths", paths},
            {"advice", all}};
}

}  // namespace ferry::tools
