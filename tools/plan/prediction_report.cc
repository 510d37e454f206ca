#include "prediction_report.h"

#include <spdlog/fmt/fmt.h>

#include <nlohmann/json.hpp>

#include "base/text.h"
#include "timeline_picture.h"
#include "train/step/momentum_schedule.h"

namespace ferry::tools {
namespace {

std::string percent(double part) { return fmt::format("{:.0f}%", 100 * part); }

std::string links_text(const train::Prediction& prediction) {
    const double step_s = prediction.step_seconds;
    std::string out = fmt::format("  {:<15} {:>12} {:>10} {:>9} {:>10}\n", "link", "bytes/step",
                                  "GB/s", "alone, s", "of a step");
    for (const train::LinkPrediction& link : prediction.links) {
        if (link.seconds <= 0) continue;
        const double rate = static_cast<double>(link.bytes) / link.seconds * 1e-9;
        out += fmt::format("  {:<15} {:>12} {:>10} {:>9.4f} {:>10}{}\n", cost::name_of(link.link),
                           link.bytes > 0 ? format_bytes(link.bytes) : "",
                           link.bytes > 0 ? fmt::format("{:.2f}", rate) : "", link.seconds,
                           percent(link.seconds / step_s),
                           &link == &prediction.binding() ? "  binds" : "");
    }
    return out;
}

std::string shares_text(const train::StateShares& shares, const model::OfSaved<double>& saved) {
    return fmt::format(
        "{} of state and gradients on the device, {} in host memory, {} on NVMe; saved for "
        "backward: "
        "{} of attention, {} of its products, {} of the MLPs'",
        percent(shares.device), percent(shares.host), percent(shares.nvme),
        percent(saved[at(model::Saved::attention)]), percent(saved[at(model::Saved::projections)]),
        percent(saved[at(model::Saved::mlp)]));
}

nlohmann::json shares_json(const train::StateShares& shares) {
    return {{"device", shares.device}, {"host", shares.host}, {"nvme", shares.nvme}};
}

// What passes through the stages of a pipeline.
const char* passing_text(const train::Prediction& prediction) {
    return prediction.by->in_turn ? "micro-batches" : "groups";
}

std::string what_if_text(const std::vector<WhatIf>& answers, double step_s) {
    std::string out = "  with                                step, s      gain\n";
    for (const WhatIf& one : answers) {
        const double gain = 100 * (step_s - one.step_seconds) / step_s;
        out += fmt::format("  {:<32} {:>10.4f} {:>8.1f}%{}\n", one.change, one.step_seconds,
                           std::abs(gain) < 0.05 ? 0 : gain,
                           one.all_in_memory ? "  all in memory, no disk" : "");
    }
    return out;
}

// Names of paths are among them.
std::string joined(const std::vector<std::string>& words, const char* between) {
    std::string text;
    for (const std::string& word : words) text += (text.empty() ? "" : between) + one_line(word);
    return text;
}

}  // namespace

std::string text_of(const PredictionReport& report) {
    std::string out;
    if (!report.found.measured.empty())
        out += fmt::format("measured now: {}\n\n", joined(report.found.measured, ", "));
    if (!report.found.at_once.empty())
        out += fmt::format("timed at the same time: {}\n\n", report.found.at_once);
    if (!report.found.assumed.empty())
        out += fmt::format("assumed, for nobody measured it: {}\n\n",
                           joined(report.found.assumed, "; "));
    if (!report.found.missing.empty())
        return out + "no prediction: " + report.found.missing + "\n\n";
    const train::Prediction& prediction = report.prediction;
    const double step_s = prediction.step_seconds;
    out += fmt::format("one step as planned{}{}: {:.4f} s\n\n",
                       prediction.speculative ? ", speculative updates committed" : "",
                       prediction.stages.empty() ? "" : ", of the stage that computes longest",
                       step_s);
    if (const auto& by = prediction.by)
        out += fmt::format(
            "a long step: {} and {} of {} {} were simulated, of all stages together, and each "
            "further one takes what those between do; {}; what lanes do when is that of {}\n\n",
            by->from, by->to, by->all, passing_text(prediction),
            by->steady ? fmt::format("within {:.0f} % of a whole simulation in tests",
                                     100 * train::kShortStepsErr)
                       : "other links bind so short a step, so it may be shorter than this "
                         "prediction, but no lane's work is",
            by->to);
    out += timeline_text(prediction) + "\n" + links_text(prediction);
    out += fmt::format(
        "\n  the plan's own bound {:.4f} s ({}), predicted step at {:.2f}x of it: {}\n"
        "  lower bound of any placement {:.4f} s ({}), predicted step at {:.2f}x of it: {}\n",
        prediction.binding().seconds, cost::name_of(prediction.binding().link),
        prediction.binding().seconds / step_s,
        shares_text(prediction.planned, prediction.planned_saved), prediction.bound_seconds,
        cost::name_of(prediction.bound_link), prediction.bound_seconds / step_s,
        shares_text(prediction.bound, prediction.bound_saved));
    if (prediction.peak_bound_seconds > 0)
        out += fmt::format(
            "  the same with every kernel at the machine's peaks {:.4f} s, predicted step at "
            "{:.2f}x of it\n",
            prediction.peak_bound_seconds, prediction.peak_bound_seconds / step_s);
    return out + "\n" + what_if_text(report.what_if, step_s) + "\n";
}

nlohmann::json to_json(const PredictionReport& report) {
    nlohmann::json measured = report.found.measured;
    if (!report.found.missing.empty())
        return {{"missing", report.found.missing}, {"measured", measured}};
    const train::Prediction& prediction = report.prediction;
    nlohmann::json links = nlohmann::json::array(), timeline = links, answers = links;
    for (const train::LinkPrediction& link : prediction.links) {
        if (link.seconds > 0)
            links.push_back({{"link", cost::name_of(link.link)},
                             {"bytes", link.bytes},
                             {"seconds", link.seconds}});
    }
    for (const Bar& bar : bars_of(prediction, 1e-3)) {
        timeline.push_back({{"lane", swap::name_of(bar.lane)},
                            {"name", bar.name},
                            {"begin_seconds", bar.begin_s},
                            {"end_seconds", bar.end_s},
                            {"tasks", bar.tasks},
                            {"bytes", bar.bytes}});
    }
    for (const WhatIf& one : report.what_if)
        answers.push_back({{"change", one.change},
                           {"step_seconds", one.step_seconds},
                           {"all_in_memory", one.all_in_memory}});
    return {
        {"exchanges", train::name_of(zero::Exchanged::gradients)},
        {"step_seconds", prediction.step_seconds},
        {"simulated_groups", prediction.by ? nlohmann::json(prediction.by->to) : nlohmann::json()},
        {"speculative", prediction.speculative},
        {"binding", cost::name_of(prediction.binding().link)},
        {"plan_bound_seconds", prediction.binding().seconds},
        {"bound_seconds", prediction.bound_seconds},
        {"bound_link", cost::name_of(prediction.bound_link)},
        {"peak_bound_seconds", prediction.peak_bound_seconds},
        {"state", shares_json(prediction.planned)},
        {"bound_state", shares_json(prediction.bound)},
        {"attention", prediction.planned_saved[at(model::Saved::attention)]},
        {"bound_attention", prediction.bound_saved[at(model::Saved::attention)]},
        {"mlp", prediction.planned_saved[at(model::Saved::mlp)]},
        {"bound_mlp", prediction.bound_saved[at(model::Saved::mlp)]},
        {"projections", prediction.planned_saved[at(model::Saved::projections)]},
        {"bound_projections", prediction.bound_saved[at(model::Saved::projections)]},
        {"links", links},
        {"timeline", timeline},
        {"what_if", answers},
        {"measured", measured},
        {"ranks_at_once", report.found.ranks_at_once},
        {"timed_at_once", report.found.at_once},
        {"assumed", report.found.assumed}};
}

nlohmann::json lanes_json(const train::ScheduleBytes& schedule, int ranks) {
    nlohmann::json lanes;
    for (size_t lane = 0; lane < swap::lanes_of(ranks); ++lane)
        lanes[std::string(swap::name_of(static_cast<swap::Lane>(lane)))] = schedule.bytes[lane];
    return lanes;
}

nlohmann::json schedules_json(const std::vector<train::ScheduleBytes>& schedules, int ranks) {
    nlohmann::json all = nlohmann::json::array();
    for (const train::ScheduleBytes& schedule : schedules)
        all.push_back({{"name", schedule.name},
                       {"exchanges", train::name_of(schedule.exchanged)},
                       {"bytes", lanes_json(schedule, ranks)}});
    return all;
}

}  // namespace ferry::tools
