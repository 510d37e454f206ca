// The schedule of a pipeline, where a predictor chooses it.
#include <spdlog/fmt/fmt.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "base/log.h"
#include "cost/kernel_times.h"
#include "train/measuring/model_on_device.h"
#include "train/measuring/planning_measurements.h"
#include "train/prediction/predictor.h"
#include "train/setup/from_config.h"
#include "train/setup/model_of.h"
#include "train/setup/stages.h"

namespace ferry::train {

using planner::Plan;

cost::Measurements Predictor::planned_by() const {
    return planning_measurements(request_of(model_->config), known_ ? &*known_ : nullptr,
                                 model_->world.local_ranks);
}

std::vector<zero::Stage> Predictor::stages_in(const StageOrder& order) const {
    const Config& config = model_->config;
    return stages_of(with_order(config, order), model_of(config).shape, model_->decoder.layers());
}

bool Predictor::chooses() const { return chooses_schedule(model_->config); }

void Predictor::choose_schedule(const cost::Measurements& of_a_rank) {
    chosen_by_ = of_a_rank;
    chosen_.reset();
}

std::vector<PlannedSchedule> Predictor::planned_schedules() const {
    std::vector<PlannedSchedule> planned;
    const int64_t blocks = std::ssize(model_->decoder.layers()) - 2;
    for (const StageOrder& order : orders_to_choose(model_->config, blocks))
        planned.push_back(plan_schedule(
            order, [&] { return plans_in(stages_in(order), request_of(model_->config)); }));
    return planned;
}

const Predictor::Chosen& Predictor::chosen() const {
    if (chosen_) return *chosen_;
    if (!chooses()) return chosen_.emplace(Chosen{.stages = model_->stages});
    std::vector<PlannedSchedule> planned = planned_schedules();
    log_debug(fmt::format("simulates {} schedules of {} stages, to choose one", planned.size(),
                          model_->config.parallel.pipeline));
    ScheduleChoice choice = train::choose_schedule(std::move(planned), model_->decoder,
                                                   chosen_by_ ? *chosen_by_ : planned_by());
    std::vector<zero::Stage> stages = stages_in(choice.order());
    return chosen_.emplace(Chosen{.choice = std::move(choice), .stages = std::move(stages)});
}

std::vector<Plan> Predictor::plans_of_all() const {
    std::vector<Plan> found;
    if (!chooses()) {
        PlannedSchedule only = plan_schedule({}, [&] { return plans(request_of(model_->config)); });
        if (!only.refusal) found.push_back(std::move(only.plans.front()));
        return found;
    }
    for (PlannedSchedule& one : planned_schedules())
        if (!one.refusal) found.push_back(std::move(one.plans.front()));
    return found;
}

bool Predictor::covers_all(const cost::KernelTimes& times) const {
    return std::ranges::all_of(plans_of_all(),
                               [&](const Plan& plan) { return covers(plan, times); });
}

std::vector<Plan> Predictor::plans_not_chosen() const {
    std::vector<Plan> found;
    const ScheduleChoice& choice = schedules();
    for (size_t i = 0; i < choice.offers.size(); ++i) {
        const ScheduleOffer& offer = choice.offers[i];
        if (i == choice.chosen || offer.refusal) continue;
        found.push_back(
            std::move(plans_in(stages_in(offer.order), request_of(model_->config)).front()));
    }
    return found;
}

bool Predictor::covers_choice(const Plan& plan, const cost::KernelTimes& times) const {
    if (!covers(plan, times)) return false;
    for (const Plan& other : plans_not_chosen())
        if (!covers(other, times)) return false;
    return true;
}

}  // namespace ferry::train
