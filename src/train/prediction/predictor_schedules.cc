// The schedule of a pipeline, where a predictor chooses it.
#include <memory>
#include <utility>
#include <vector>

#include "cost/kernel_times.h"
#include "measure.h"
#include "model_on_device.h"
#include "planner/work.h"
#include "planning_measurements.h"
#include "train/prediction/predictor.h"
#include "train/setup/from_config.h"
#include "train/setup/model_of.h"
#include "train/setup/stages.h"
#include "train/stack/tier_stack.h"
#include "train/step/step.h"

namespace ferry::train {

using planner::Plan;

cost::Measurements Predictor::planned_by() const {
    return planning_measurements(request_of(model_->config), known_ ? &*known_ : nullptr,
                                 model_->world.local_ranks);
}

std::vector<zero::Stage> Predictor::stages_in(PipelineSchedule schedule) const {
    const Config& config = model_->config;
    return stages_of(with_schedule(config, schedule), model_of(config).shape,
                     model_->decoder.layers());
}

void Predictor::choose_schedule(const cost::Measurements& of_a_rank) {
    if (!chooses_schedule(model_->config)) return;
    std::vector<PlannedSchedule> planned;
    for (const PipelineSchedule schedule : schedules_to_choose(model_->config))
        planned.push_back(plan_schedule(
            schedule, [&] { return plans_in(stages_in(schedule), request_of(model_->config)); }));
    choice_ = train::choose_schedule(std::move(planned), model_->decoder, of_a_rank);
    stages_ = stages_in(choice_.schedule());
}

std::vector<Plan> Predictor::plans_not_chosen() const {
    std::vector<Plan> found;
    for (size_t i = 0; i < choice_.offers.size(); ++i) {
        const ScheduleOffer& offer = choice_.offers[i];
        if (i == choice_.chosen || offer.refusal) continue;
        found.push_back(
            std::move(plans_in(stages_in(offer.schedule), request_of(model_->config)).front()));
    }
    return found;
}

bool Predictor::covers_choice(const Plan& plan, const cost::KernelTimes& times) const {
    if (!covers(plan, times)) return false;
    for (const Plan& other : plans_not_chosen())
        if (!covers(other, times)) return false;
    return true;
}

// The kernels of the schedules that were not chosen, but for those that are timed: whoever has
// these measurements can choose by them.
void Predictor::time_others(cost::Measurements& found) {
    for (const Plan& other : plans_not_chosen()) {
        const RankShare share = share_to_measure();
        const std::unique_ptr<TierStack> stack = stack_of(with_all_layers(other), share);
        const cost::WorkOf work_of = planner::work_of(stack->plan());
        swap::Schedule untimed;
        for (const swap::Task& task :
             record_step(stack->plan(), Previous::not_speculative, false).tasks) {
            if (!cost::is_timed(task)) continue;
            const auto kind = cost::KernelTimes::kind_of(task, work_of);
            if (!found.kernels.seconds.contains(kind)) untimed.tasks.push_back(task);
        }
        if (untimed.tasks.empty()) continue;
        const Bench bench = stack->bench();
        const planner::Buffers& state =
            stack->plan().buffers[static_cast<size_t>(planner::Class::state_staging)];
        fill_buffers(
            bench, make_patterns(stack->arena().subspan(size_t(state.offset), size_t(state.bytes)),
                                 model_->decoder.shape().vocab));
        found.kernels.seconds.merge(time_kernels(untimed, bench).seconds);
        stack->store().drain();  // throws what went wrong
    }
}

// Nothing is stored: the paths are the run's.
RankShare Predictor::share_to_measure() const {
    return {.budgets = model_->config.budgets, .threads = model_->share().threads};
}

std::unique_ptr<TierStack> Predictor::stack_of(Plan buffers, const RankShare& share) {
    auto stack = std::make_unique<TierStack>(
        TierStack::Ground{.config = model_->config,
                          .share = share,
                          .executor = *model_->executor,
                          .device = *model_->device,
                          .machine = model_->own_machine(),
                          .ranks = model_->world.ranks},
        TierStack::Model{model_->decoder.shape(), model_->decoder.numerics(),
                         model_->decoder.layers()});
    buffers.host_bytes = buffers.io_bytes;
    stack->plan(std::move(buffers));
    stack->reserve({.host_budget_bytes = stack->plan().host_bytes, .name = "staging"});
    stack->open({.buffers_alone = true});
    stack->kernels().states()[StepStates::kMeasured] = {.step = 1, .gradient_scale = 1};
    return stack;
}

}  // namespace ferry::train
