#include "pipeline_report.h"

#include <spdlog/fmt/fmt.h>

#include <algorithm>

#include "base/log.h"
#include "base/text.h"
#include "timeline_picture.h"
#include "tools/train/run_table.h"

namespace ferry::tools {
namespace {

// "embedding, 0-3": the blocks by their numbers.
std::string layers_of(const planner::Plan& plan) {
    const zero::Stage& stage = plan.partition.stage;
    const int64_t first = std::max<int64_t>(stage.first, 1) - 1, last = first + plan.blocks() - 1;
    return fmt::format("{}{}{}", stage.is_first() ? "embedding, " : "",
                       first == last ? std::to_string(first) : fmt::format("{}-{}", first, last),
                       stage.is_last() ? ", head" : "");
}

std::string groups_text(const planner::Plan& plan) {
    return fmt::format("{} group{} of {} micro-batch{}", plan.groups, plan.groups == 1 ? "" : "s",
                       plan.group_size(), plan.group_size() == 1 ? "" : "es");
}

// What a stage waits, where all are as fast, in one order or the other.
double bubble_with(planner::Plan plan, bool splits_backward) {
    plan.partition.stage.splits_backward = splits_backward;
    return train::bubble_of(plan);
}

std::string other_schedule_text(const planner::Plan& plan) {
    if (plan.partition.stage.splits_backward) return {};
    return fmt::format(" ({:.1f} % with parallel.schedule zero_bubble)",
                       100 * bubble_with(plan, true));
}

double waits_most(const train::Prediction& prediction) {
    return std::ranges::max(prediction.stages, {}, &train::StagePrediction::waits).waits;
}

std::string sent_text(const std::vector<planner::Plan>& plans,
                      const train::Prediction& prediction) {
    std::string text = fmt::format("\n  {:>5} {:>12} {:>12} {:>12} {:>14} {:>12} {:>12} {:>7}\n",
                                   "stage", "to the next", "back", "of a table", "in its stage",
                                   "in kernels", "computes, s", "waits");
    for (size_t s = 0; s < plans.size(); ++s) {
        const train::StagePrediction& stage = prediction.stages[s];
        text += fmt::format(
            "  {:>5} {:>12} {:>12} {:>12} {:>14} {:>12} {:>12.4f} {:>6.1f}%\n", stage.stage.index,
            format_bytes(stage.to_next), format_bytes(stage.to_previous),
            format_bytes(stage.of_table), format_bytes(stage.to_sharers),
            format_bytes(kernel_bytes(plans[s]).bytes), stage.compute_seconds, 100 * stage.waits);
    }
    return text;
}

// What its kernels do when, neighbours alike as one.
nlohmann::json kernels_json(const train::StagePrediction& stage) {
    nlohmann::json kernels = nlohmann::json::array();
    for (const Bar& bar : bars_of(stage.schedule, stage.timeline, 1e-3)) {
        if (bar.lane != swap::Lane::compute) continue;
        kernels.push_back(
            {{"name", bar.name}, {"begin_seconds", bar.begin_s}, {"end_seconds", bar.end_s}});
    }
    return kernels;
}

std::string choice_text(const train::ScheduleChoice& choice) {
    if (choice.offers.empty()) return {};
    std::string text = fmt::format(
        "\n  parallel.schedule auto, weighed before anything is measured here:\n  {:<14} {:>10} "
        "{:>7} {:>12} {:>12} {:>12} {:>12}\n",
        "schedule", "step, s", "waits", "weights", "device", "host", "NVMe");
    for (size_t i = 0; i < choice.offers.size(); ++i) {
        const train::ScheduleOffer& offer = choice.offers[i];
        text += fmt::format("  {:<14} ", train::name_of(offer.schedule));
        if (offer.refusal)
            text += "cannot be: " + one_line(train::why_not(*offer.refusal));
        else
            text +=
                fmt::format("{:>10.4f} {:>6.1f}% {:>12} {:>12} {:>12} {:>12}{}", offer.seconds,
                            100 * offer.waits, format_bytes(offer.weight_bytes),
                            format_bytes(offer.device_bytes), format_bytes(offer.host_bytes),
                            format_bytes(offer.nvme_bytes), i == choice.chosen ? "  taken" : "");
        text += "\n";
    }
    return text +
           "  each of the stage that has most: what it waits, weights that come to a rank's "
           "device in a step, its memory\n";
}

nlohmann::json choice_json(const train::ScheduleChoice& choice) {
    nlohmann::json all = nlohmann::json::array();
    for (const train::ScheduleOffer& offer : choice.offers) {
        nlohmann::json one = {{"schedule", train::name_of(offer.schedule)}};
        if (offer.refusal)
            one.update({{"refused", train::why_not(*offer.refusal)}});
        else
            one.update({{"step_seconds", offer.seconds},
                        {"waits", offer.waits},
                        {"weight_bytes", offer.weight_bytes},
                        {"device_bytes", offer.device_bytes},
                        {"host_bytes", offer.host_bytes},
                        {"nvme_bytes", offer.nvme_bytes}});
        all.push_back(std::move(one));
    }
    return all;
}

}  // namespace

void warn_of_bubble(const std::vector<planner::Plan>& plans) {
    const planner::Plan& first = plans.front();
    if (first.groups >= std::ssize(plans)) return;
    log_warn(fmt::format(
        "{} for {} stages: each stage waits {:.0f} % of a step where all are as fast; raise "
        "batch.micro_batches{}, or lower parallel.pipeline",
        groups_text(first), plans.size(), 100 * train::bubble_of(first),
        first.group_size() > 1 ? " or swap.groups" : ""));
}

std::string pipeline_text(const std::vector<planner::Plan>& plans,
                          const train::Prediction* prediction,
                          const train::ScheduleChoice& choice) {
    if (plans.size() == 1) return {};
    const planner::Plan& first = plans.front();
    const int of_a_stage = first.partition.of_run() / first.partition.stage.count;
    std::string text = fmt::format(
        "a pipeline of {} stages of {} rank{}, through which {} pass: each waits {:.1f} % of a "
        "step where all are as fast{}{}\n\n  {:>5} {:<20} {:>12} {:>12} {:>12}\n",
        plans.size(), of_a_stage, of_a_stage == 1 ? "" : "s", groups_text(first),
        100 * train::bubble_of(first), other_schedule_text(first),
        prediction ? fmt::format(", as planned up to {:.1f} %", 100 * waits_most(*prediction)) : "",
        "stage", "blocks", "device", "host", "NVMe");
    for (const planner::Plan& plan : plans)
        text += fmt::format("  {:>5} {:<20} {:>12} {:>12} {:>12}\n", plan.partition.stage.index,
                            layers_of(plan),
                            format_bytes(plan.device_bytes + plan.device_overhead_bytes),
                            format_bytes(plan.host_bytes), format_bytes(plan.nvme_bytes));
    return text + (prediction ? sent_text(plans, *prediction) : "") + choice_text(choice) + "\n";
}

nlohmann::json pipeline_json(const std::vector<planner::Plan>& plans,
                             const train::Prediction* prediction,
                             const train::ScheduleChoice& choice, PipelineSchedule schedule) {
    nlohmann::json stages = nlohmann::json::array();
    for (size_t s = 0; s < plans.size(); ++s) {
        const planner::Plan& plan = plans[s];
        stages.push_back({{"first_layer", plan.partition.stage.first},
                          {"end_layer", plan.partition.stage.end},
                          {"blocks", plan.blocks()},
                          {"device_bytes", plan.device_bytes},
                          {"host_bytes", plan.host_bytes},
                          {"nvme_bytes", plan.nvme_bytes},
                          {"kernel_bytes", kernel_bytes(plan).bytes}});
        if (!prediction) continue;
        const train::StagePrediction& of = prediction->stages[s];
        stages.back().update({{"to_next_bytes", of.to_next},
                              {"to_previous_bytes", of.to_previous},
                              {"of_table_bytes", of.of_table},
                              {"to_sharers_bytes", of.to_sharers},
                              {"compute_seconds", of.compute_seconds},
                              {"timeline", kernels_json(of)},
                              {"waits", of.waits}});
    }
    const planner::Plan& first = plans.front();
    return {{"stages", stages},
            {"schedule", train::name_of(choice.offers.empty() ? schedule : choice.schedule())},
            {"schedules", choice_json(choice)},
            {"bubble", train::bubble_of(first)},
            {"bubbles",
             {{"1f1b", bubble_with(first, false)}, {"zero_bubble", bubble_with(first, true)}}}};
}

}  // namespace ferry::tools
