// The schedule of a pipeline, where a predictor chooses it.
#include <utility>
#include <vector>

#include "cost/kernel_times.h"
#include "model_on_device.h"
#include "planning_measurements.h"
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

void Predictor::choose_schedule(const cost::Measurements& of_a_rank) {
    chosen_by_ = of_a_rank;
    choose_schedule_by(of_a_rank);
}

void Predictor::choose_schedule_by(const cost::Measurements& of_a_rank) {
    if (!chooses_schedule(model_->config)) return;
    std::vector<PlannedSchedule> planned;
    const int64_t blocks = std::ssize(model_->decoder.layers()) - 2;
    for (const StageOrder& order : orders_to_choose(model_->config, blocks))
        planned.push_back(plan_schedule(
            order, [&] { return plans_in(stages_in(order), request_of(model_->config)); }));
    choice_ = train::choose_schedule(std::move(planned), model_->decoder, of_a_rank);
    stages_ = stages_in(choice_.order());
}

std::vector<Plan> Predictor::plans_not_chosen() const {
    std::vector<Plan> found;
    for (size_t i = 0; i < choice_.offers.size(); ++i) {
        const ScheduleOffer& offer = choice_.offers[i];
        if (i == choice_.chosen || offer.refusal) continue;
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
