#include "pipeline_report.h"

#include <spdlog/fmt/fmt.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "base/text.h"
#include "config/words.h"
#include "timeline_picture.h"
#include "tools/train/run_table.h"
#include "train/setup/stages.h"

namespace ferry::tools {

using config::kPipelineSchedules;

namespace {

// "embedding, 0-3, 8-11": the blocks by their numbers.
std::string layers_of(const planner::Plan& plan) {
    const zero::Stage& stage = plan.partition.stage;
    std::string text = stage.is_first() ? "embedding, " : "";
    for (int64_t v = 0; v < stage.virtual_stages(); ++v) {
        const zero::VirtualStage of = stage.virtual_stage(v);
        const int64_t first = std::max<int64_t>(of.first, 1) - 1,
                      last = std::min(of.end, std::ssize(plan.layers) - 1) - 2;
        text += v > 0 ? ", " : "";
        text += first == last ? std::to_string(first) : fmt::format("{}-{}", first, last);
    }
    return text + (stage.is_last() ? ", head" : "");
}

PipelineSchedule schedule_of(const planner::Plan& plan) {
    const zero::Stage& stage = plan.partition.stage;
    if (stage.round_robin) return PipelineSchedule::round_robin;
    if (stage.virtual_stages() > 1) return PipelineSchedule::interleaved;
    return stage.splits_backward ? PipelineSchedule::zero_bubble : PipelineSchedule::one_f_one_b;
}

// How a plan's micro-batches would go through its stages in another order: where the plan has one
// virtual stage, in two of them.
struct Other {
    PipelineSchedule schedule{};
    int64_t groups = 1, virtual_stages = 1;
    double bubble = 0;  // what a stage waits, where all are as fast
};
Other in_order(const planner::Plan& plan, PipelineSchedule schedule) {
    using enum PipelineSchedule;
    const zero::Stage& stage = plan.partition.stage;
    const bool mine = schedule == schedule_of(plan),
               several = schedule == interleaved || schedule == round_robin;
    Other found{.schedule = schedule, .groups = plan.groups};
    if (!mine && schedule == round_robin) found.groups = 1;
    if (!mine && stage.round_robin) found.groups = plan.micro_batches;
    if (several)
        found.virtual_stages =
            mine ? stage.virtual_stages() : std::max<int64_t>(stage.virtual_stages(), 2);
    found.bubble = train::bubble_of(found.groups, stage.count, plan.micro_batches / found.groups,
                                    plan.blocks(), schedule == zero_bubble, found.virtual_stages);
    return found;
}

// Those that are there: no stage has more virtual stages than blocks.
std::vector<Other> in_every_order(const std::vector<planner::Plan>& plans) {
    const int64_t blocks = std::ranges::min(plans, {}, &planner::Plan::blocks).blocks();
    std::vector<Other> found;
    for (const auto& known : kPipelineSchedules) {
        if (known.value == PipelineSchedule::automatic) continue;
        const Other other = in_order(plans.front(), known.value);
        if (other.virtual_stages <= blocks) found.push_back(other);
    }
    return found;
}

std::string other_schedules_text(const std::vector<planner::Plan>& plans) {
    std::string text;
    for (const Other& other : in_every_order(plans)) {
        if (other.schedule == schedule_of(plans.front())) continue;
        text += fmt::format(
            "{}{:.1f} % with {}{}", text.empty() ? "" : ", ", 100 * other.bubble,
            train::name_of(other.schedule),
            other.virtual_stages > 1 ? fmt::format(" of {}", other.virtual_stages) : "");
    }
    return fmt::format(" (parallel.schedule: {})", text);
}

std::string streamed_text(const std::vector<planner::Plan>& plans,
                          const train::Prediction& prediction) {
    std::string text = fmt::format("\n  {:>5} {:>14} {:>18} {:>18}\n", "stage", "weights up",
                                   "accumulators down", "accumulators up");
    int64_t most = 0, in_turn = 0;
    for (size_t s = 0; s < plans.size(); ++s) {
        const train::StagePrediction& of = prediction.stages[s];
        text += fmt::format("  {:>5} {:>14} {:>18} {:>18}\n", s, format_bytes(of.weights_up),
                            format_bytes(of.accumulators_down), format_bytes(of.accumulators_up));
        most = std::max(most, of.weights_up);
        // Every group moves them.
        in_turn = std::max(in_turn, of.weights_up / plans[s].groups);
    }
    if (plans.front().groups == 1 || most == 0) return text;
    return text + fmt::format(
                      "  {} groups each move the weights that stream: {} a step at most; with "
                      "parallel.schedule round_robin and one group {}, and no accumulators\n",
                      plans.front().groups, format_bytes(most), format_bytes(in_turn));
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
    return text + "  waits: the part of a step as simulated; computes: that its kernels run then\n";
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
        "\n  parallel.schedule auto or virtual_stages auto, weighed before anything is measured "
        "here:\n  {:<14} {:>10} "
        "{:>7} {:>12} {:>12} {:>12} {:>12}\n",
        "schedule", "step, s", "waits", "weights", "device", "host", "NVMe");
    for (size_t i = 0; i < choice.offers.size(); ++i) {
        const train::ScheduleOffer& offer = choice.offers[i];
        text += fmt::format("  {:<14} ", train::name_of(offer.order));
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
           "  as simulated, each of the stage that has most: what it waits, weights that come to a "
           "rank's device in a step, its memory\n";
}

nlohmann::json choice_json(const train::ScheduleChoice& choice) {
    nlohmann::json all = nlohmann::json::array();
    for (const train::ScheduleOffer& offer : choice.offers) {
        nlohmann::json one = {{"schedule", train::name_of(offer.order.schedule)},
                              {"virtual_stages", offer.order.virtual_stages}};
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

std::string pipeline_text(const std::vector<planner::Plan>& plans,
                          const train::Prediction* prediction,
                          const train::ScheduleChoice& choice) {
    if (plans.size() == 1) return {};
    const planner::Plan& first = plans.front();
    const int of_a_stage = first.partition.of_run() / first.partition.stage.count;
    std::string text = fmt::format(
        "a pipeline of {} stages of {} rank{}, through which {} pass: by theory each waits {:.1f} "
        "% "
        "of a step, where all are as fast{}{}\n\n  {:>5} {:<20} {:>12} {:>12} {:>12}\n",
        plans.size(), of_a_stage, of_a_stage == 1 ? "" : "s", train::groups_text(first),
        100 * train::bubble_of(first), other_schedules_text(plans),
        prediction
            ? fmt::format("; as simulated one waits up to {:.1f} %", 100 * waits_most(*prediction))
            : "",
        "stage", "blocks", "device", "host", "NVMe");
    for (const planner::Plan& plan : plans)
        text += fmt::format("  {:>5} {:<20} {:>12} {:>12} {:>12}\n", plan.partition.stage.index,
                            layers_of(plan),
                            format_bytes(plan.device_bytes + plan.device_overhead_bytes),
                            format_bytes(plan.host_bytes), format_bytes(plan.nvme_bytes));
    if (prediction) text += sent_text(plans, *prediction) + streamed_text(plans, *prediction);
    return text + choice_text(choice) + "\n";
}

nlohmann::json pipeline_json(const std::vector<planner::Plan>& plans,
                             const train::Prediction* prediction,
                             const train::ScheduleChoice& choice) {
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
                              {"weights_up_bytes", of.weights_up},
                              {"accumulators_down_bytes", of.accumulators_down},
                              {"accumulators_up_bytes", of.accumulators_up},
                              {"compute_seconds", of.compute_seconds},
                              {"timeline", kernels_json(of)},
                              {"waits", of.waits}});
    }
    nlohmann::json bubbles;
    for (const Other& other : in_every_order(plans))
        bubbles[std::string(train::name_of(other.schedule))] = other.bubble;
    const planner::Plan& first = plans.front();
    return {{"stages", stages},
            {"schedule", train::name_of(schedule_of(first))},
            {"virtual_stages", first.partition.stage.virtual_stages()},
            {"schedules", choice_json(choice)},
            {"bubble", train::bubble_of(first)},
            {"bubbles", bubbles}};
}

}  // namespace ferry::tools
