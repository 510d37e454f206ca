// What a step of a plan takes: one rank's, or that of all stages of a pipeline.
#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "cost/bound.h"
#include "cost/measurements.h"
#include "cost/operations.h"
#include "cost/simulator.h"
#include "cost/traffic.h"
#include "ferry/config.h"
#include "model/model.h"
#include "planner/planner.h"
#include "planner/request.h"
#include "planner/work.h"
#include "simulated_stages.h"
#include "step_timeline.h"
#include "swap/schedule.h"
#include "train/measuring/model_on_device.h"
#include "train/prediction/predictor.h"
#include "train/setup/rank_share.h"
#include "train/step/step.h"

namespace ferry::train {

using cost::Link;
using planner::Plan;
using swap::Lane;

namespace {

StateShares shares_of(const Plan& plan) {
    std::array<double, 3> bytes{};
    for (const planner::Chunk& chunk : plan.chunks) {
        if (!chunk.trainable) continue;
        for (const swap::ObjectId id : {chunk.state, chunk.gradient})
            bytes[static_cast<size_t>(plan.objects[id].home)] +=
                static_cast<double>(plan.objects[id].bytes);
    }
    const double all = bytes[0] + bytes[1] + bytes[2];
    return {bytes[0] / all, bytes[1] / all, bytes[2] / all};
}

std::vector<LinkPrediction> links_of(const swap::Schedule& step, const Plan& plan,
                                     const cost::Measurements& speeds) {
    const cost::WorkOf work_of = planner::work_of(plan);
    const swap::CostModel cost = cost::cost_model(work_of, speeds);
    std::array<int64_t, swap::kLanes> bytes{};
    double compute_s = 0, cores_s = 0, update_bytes = 0, begins_s = 0, passing_s = 0;
    cost::CommTraffic comm;
    for (const swap::Task& task : step.tasks) {
        bytes[static_cast<size_t>(task.lane)] += task.lane == Lane::compute ? 0 : task.bytes;
        const swap::Cost taken = cost(task);
        cores_s += taken.seconds * taken.part[static_cast<size_t>(swap::Shared::cores)];
        if (task.lane == Lane::compute) compute_s += taken.seconds;
        if (cost::passes(task)) {
            passing_s += taken.seconds;
        } else if (task.lane == Lane::comm) {
            comm.of(cost::among(task)) += static_cast<double>(task.bytes);
            begins_s +=
                cost::group_seconds(0, 1, cost::rate_among(cost::among(task), speeds), speeds);
        }
        if (task.lane == Lane::team || speeds.computes_on_host)
            update_bytes += cost::bytes_of_update(task, work_of);
    }
    const auto on = [&](Lane lane) { return bytes[static_cast<size_t>(lane)]; };
    const int64_t up = on(Lane::h2d), down = on(Lane::d2h),
                  stored = on(Lane::read) + on(Lane::write);
    const double dram = cost::dram_bytes(update_bytes, static_cast<double>(up + down),
                                         static_cast<double>(stored), speeds);
    const auto seconds = [](double moved, double rate) { return moved > 0 ? moved / rate : 0; };
    std::vector<LinkPrediction> links{
        {Link::compute, 0, compute_s},
        {Link::host_to_device, up, seconds(double(up), speeds.copy_bytes_per_s)},
        {Link::device_to_host, down, seconds(double(down), speeds.copy_bytes_per_s)},
        {Link::nvme, stored, seconds(double(stored), speeds.nvme_bytes_per_s)},
        {Link::dram, static_cast<int64_t>(dram), seconds(dram, speeds.dram_bytes_per_s)},
        {Link::cores, 0, cores_s}};
    if (!plan.partition.decides_alone())
        links.push_back(
            {Link::comm, on(Lane::comm), passing_s + begins_s + cost::comm_seconds(comm, speeds)});
    return links;
}

// Steps that follow each other take no less than any link works for one, and no less than the lower
// bound. Two simulated ones can: where a drive or a network binds, what it owes grows step by step.
void hold_to_bounds(Prediction& found, const std::vector<LinkPrediction>& links) {
    found.step_seconds = std::max(found.step_seconds, found.bound_seconds);
    for (const LinkPrediction& link : links)
        found.step_seconds = std::max(found.step_seconds, link.seconds);
}

}  // namespace

Prediction Predictor::predict(const planner::PlanRequest& request, const Plan& plan,
                              const cost::Measurements& measured, Exchanged what) const {
    return plan.partition.stage.all() ? predict_one(request, plan, measured, what)
                                      : predict_pipeline(request, measured);
}

Prediction Predictor::predict_one(const planner::PlanRequest& request, const Plan& plan,
                                  const cost::Measurements& measured, Exchanged what) const {
    cost::Measurements measurements = cost::of_rank(measured, model_->world.local_ranks);
    Prediction found;
    found.speculative = plan.speculative && what == Exchanged::gradients;
    const Previous steady = what == Exchanged::nothing ? Previous::alone
                            : found.speculative        ? Previous::committed
                                                       : Previous::not_speculative;
    const auto step = [&](Previous previous) {
        return what == Exchanged::gradients ? record_step(plan, previous, found.speculative)
                                            : model_->momentum_step(plan, previous, measurements);
    };
    const swap::Schedule first = step(Previous::none);
    found.schedule = step(steady);
    found.timeline = predict_steps(plan, first, found.schedule, measurements);
    found.step_seconds = found.timeline.step_seconds;
    found.links = links_of(found.schedule, plan, measurements);
    if (what == Exchanged::nothing) {  // it leaves the state as it is: no bound
        hold_to_bounds(found, found.links);
        return found;
    }
    const cost::Bound bound = bound_of(model_->possible(request).budgets, plan,
                                       model_->decoder.shape(), found.schedule, measurements, what);
    found.bound_seconds = bound.seconds;
    found.bound_link = bound.binding;
    hold_to_bounds(found, found.links);
    found.peak_bound_seconds = bound_by_peaks(model_->possible(request).budgets, plan,
                                              model_->decoder, found.schedule, measurements, what)
                                   .seconds;
    found.planned = shares_of(plan);
    found.bound = {bound.state_on_device, bound.state_in_host,
                   1 - bound.state_on_device - bound.state_in_host};
    for (const model::Saved saved : model::kAllSaved) {
        if (plan.blocks_at_most() > 0)
            found.planned_saved[at(saved)] = static_cast<double>(plan.blocks_saving(saved)) /
                                             static_cast<double>(plan.blocks_at_most());
    }
    found.bound_saved = bound.saved;
    return found;
}

namespace {

// Weights that come to the device, and accumulators that leave and come back.
void add_streamed(StagePrediction& stage, const Plan& plan, const swap::Schedule& step) {
    enum class Kind : uint8_t { other, weight, accumulator };
    std::vector<Kind> kinds(plan.objects.size());
    const auto mark = [&](swap::ObjectId object, Kind kind) {
        if (object != swap::kNoObject) kinds[object] = kind;
    };
    for (const planner::Chunk& chunk : plan.chunks) mark(chunk.weight, Kind::weight);
    for (const planner::AccumulatorSpill& spill : plan.spills) {
        mark(spill.object, Kind::accumulator);
        mark(spill.table, Kind::accumulator);
    }
    for (const swap::Task& task : step.tasks) {
        if (task.verb != swap::Verb::copy || task.object == swap::kNoObject) continue;
        const bool up = task.lane == Lane::h2d;
        if (kinds[task.object] == Kind::accumulator)
            (up ? stage.accumulators_up : stage.accumulators_down) += task.bytes;
        // A resident weight comes with its update.
        const bool streams = plan.objects[task.object].home != swap::Tier::device;
        if (kinds[task.object] == Kind::weight && up && streams) stage.weights_up += task.bytes;
    }
}

StagePrediction stage_of(const Plan& plan, swap::Schedule schedule, swap::Timeline timeline) {
    using cost::StageLink;
    constexpr auto kCompute = static_cast<size_t>(Lane::compute);
    StagePrediction found{.stage = plan.partition.stage,
                          .blocks = plan.blocks(),
                          .device_bytes = plan.device_bytes + plan.device_overhead_bytes,
                          .host_bytes = plan.host_bytes,
                          .nvme_bytes = plan.nvme_bytes,
                          .compute_seconds = timeline.busy_seconds[kCompute]};
    for (const swap::Task& task : schedule.tasks) {
        if (task.lane != Lane::comm) continue;
        if (!cost::passes(task)) found.to_sharers += task.bytes;
        if (cost::row_of(task).stage_end != cost::StageEnd::sends) continue;
        const auto link = static_cast<StageLink>(task.flags);
        (link == StageLink::next       ? found.to_next
         : link == StageLink::previous ? found.to_previous
                                       : found.of_table) += task.bytes;
    }
    add_streamed(found, plan, schedule);
    found.schedule = std::move(schedule);
    found.timeline = std::move(timeline);
    return found;
}

// Of the step that is predicted, which may be longer than the simulated ones.
void add_waits(Prediction& found) {
    for (StagePrediction& stage : found.stages)
        stage.waits = 1 - stage.compute_seconds / found.step_seconds;
}

std::vector<StageStep> steps_of(const Prediction& predicted) {
    std::vector<StageStep> found;
    found.reserve(predicted.stages.size());
    for (const StagePrediction& stage : predicted.stages)
        found.push_back(
            {.seconds = stage.timeline.step_seconds, .lanes = stage.timeline.busy_seconds});
    return found;
}

// Makes of the longer one of two short steps what all of a long one take, which is `seconds`.
void lengthen(Prediction& to, const Prediction& from, const ShortSteps& steps, double seconds) {
    const auto line = [&](double& value, double of_from) { value = steps.at_all(of_from, value); };
    const auto line_of_bytes = [&](int64_t& value, int64_t of_from) {
        value =
            std::llround(steps.at_all(static_cast<double>(of_from), static_cast<double>(value)));
    };
    to.by = steps;
    to.step_seconds = seconds;
    line(to.bound_seconds, from.bound_seconds);
    line(to.peak_bound_seconds, from.peak_bound_seconds);
    for (size_t l = 0; l < to.links.size(); ++l) {
        line(to.links[l].seconds, from.links[l].seconds);
        line_of_bytes(to.links[l].bytes, from.links[l].bytes);
    }
    hold_to_bounds(to, to.links);
    for (size_t s = 0; s < to.stages.size(); ++s) {
        StagePrediction& stage = to.stages[s];
        const StagePrediction& before = from.stages[s];
        for (const auto bytes :
             {&StagePrediction::to_next, &StagePrediction::to_previous, &StagePrediction::of_table,
              &StagePrediction::to_sharers, &StagePrediction::weights_up,
              &StagePrediction::accumulators_down, &StagePrediction::accumulators_up})
            line_of_bytes(stage.*bytes, before.*bytes);
        line(stage.compute_seconds, before.compute_seconds);
    }
    add_waits(to);
}

}  // namespace

// A long step by two short ones, of the same stage.
Prediction Predictor::predict_pipeline(const planner::PlanRequest& request,
                                       const cost::Measurements& measured) const {
    const std::vector<Plan> plans = this->plans(request);
    Prediction from, to;
    const std::optional<ShortSteps> steps =
        steady_steps_of(plans, kMostVisits, [&](const ShortSteps& these) {
            to = predict_together(request, shortened(plans, these.to), measured);
            from = predict_together(request, shortened(plans, these.from), measured, to.shown);
            return these.are_steady(steps_of(from), steps_of(to));
        });
    if (!steps) return predict_together(request, plans, measured);
    const bool speculative = std::ranges::all_of(plans, &Plan::speculative);
    lengthen(
        to, from, *steps,
        seconds_of_long_step(*steps, steps_of(from), steps_of(to), plans, speculative,
                             model_->decoder, cost::of_rank(measured, model_->world.local_ranks)));
    return to;
}

// Each stage's schedule, simulated together. What a stage shows alone is that of the longest.
Prediction Predictor::predict_together(const planner::PlanRequest& request,
                                       const std::vector<Plan>& plans,
                                       const cost::Measurements& measured,
                                       std::optional<size_t> shown) const {
    cost::Measurements measurements = cost::of_rank(measured, model_->world.local_ranks);
    const bool speculative = speculate(plans);
    RecordedStages steps = record_stages(plans, speculative);
    add_assumed_kernels(plans, steps, model_->decoder, measurements);
    std::vector<swap::Timeline> timelines =
        predict_stages(plans, steps.first, steps.steady, measurements);
    std::vector<swap::Schedule>& steady = steps.steady;
    Prediction found{.speculative = speculative};
    double most_s = -1;
    for (size_t s = 0; s < plans.size(); ++s) {
        const Plan& plan = plans[s];
        const BudgetConfig budgets = model_->possible(request).budgets;
        const cost::Bound bound =
            bound_of(budgets, plan, model_->decoder.shape(), steady[s], measurements);
        found.peak_bound_seconds = std::max(
            found.peak_bound_seconds,
            bound_by_peaks(budgets, plan, model_->decoder, steady[s], measurements).seconds);
        if (bound.seconds > found.bound_seconds) {
            found.bound_seconds = bound.seconds;
            found.bound_link = bound.binding;
            found.bound = {bound.state_on_device, bound.state_in_host,
                           1 - bound.state_on_device - bound.state_in_host};
            found.bound_saved = bound.saved;
        }
        const std::vector<LinkPrediction> links = links_of(steady[s], plan, measurements);
        found.stages.push_back(stage_of(plan, std::move(steady[s]), std::move(timelines[s])));
        const StagePrediction& stage = found.stages.back();
        found.step_seconds = std::max(found.step_seconds, stage.timeline.step_seconds);
        hold_to_bounds(found, links);
        if (shown ? s != *shown : stage.compute_seconds <= most_s) continue;
        most_s = stage.compute_seconds;
        found.shown = s;
        found.schedule = stage.schedule;
        found.timeline = stage.timeline;
        found.links = links;
        found.planned = shares_of(plan);
        for (const model::Saved saved : model::kAllSaved) {
            if (plan.blocks_at_most() > 0)
                found.planned_saved[at(saved)] = static_cast<double>(plan.blocks_saving(saved)) /
                                                 static_cast<double>(plan.blocks_at_most());
        }
    }
    add_waits(found);
    return found;
}

}  // namespace ferry::train
