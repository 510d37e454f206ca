// What a run measures of itself: its report, its prediction, and its loss on tokens held back.
#include <algorithm>
#include <cstdint>
#include <span>
#include <string>
#include <utility>

#include "clipped_share.h"
#include "comm/comm.h"
#include "cost/measurements.h"
#include "cost/traffic.h"
#include "engine_impl.h"
#include "outcome.h"
#include "run_report.h"
#include "train/kernels/step_kernels.h"
#include "train/measuring/measure.h"
#include "train/measuring/planning_measurements.h"
#include "train/prediction/simulated_stages.h"
#include "train/rank_agreement.h"
#include "train/stack/memory_left.h"
#include "train/step/schedules.h"

namespace ferry::train {

void Engine::Run::measure_anew() {
    store().reset_report();
    if (steps_->lane) steps_->lane->count_anew();
    for (const auto* exchange : {&setup_.of_sequences, &setup_.of_tensors})
        if (*exchange) (*exchange)->count_anew();
    if (momentum_) momentum_->count_anew();
}

RunReport Engine::Run::so_far() {
    drain();
    RunReport report = totals_;
    report.model_flops = cost::model_flops(plan().layers, stack_->decoder().shape(),
                                           setup_.numerics.whole_sequence(),
                                           plan().micro_batches * setup_.numerics.tokens());
    add_links(report.links, store(), setup_.world.ranks);
    if (steps_->lane) add_collectives(report.collectives, steps_->lane->collectives());
    for (const auto* exchange : {&setup_.of_sequences, &setup_.of_tensors})
        if (*exchange) add_collectives(report.collectives, (*exchange)->sent());
    if (momentum_ && momentum_->sent().calls > 0)
        add_collectives(report.collectives, {momentum_->sent()});
    report.reserved = stack_->reserved();
    if (volume()) report.paths = volume()->counters();
    look_for_files();
    report.removed = published_.removed;
    return report;
}

// Ranks that share the tables put logits together.
bool Engine::Run::some_rank_asks(bool mine) {
    if (setup_.world.slicing().ranks == 1) return mine;
    const auto all =
        gather(*setup_.ranks, setup_.executor, static_cast<uint8_t>(mine), "evaluation");
    return std::ranges::any_of(all, [](uint8_t asks) { return asks != 0; });
}

// Each rank goes through as many micro-batches, the last ones perhaps without a target.
Evaluation Engine::Run::held_back(std::span<float> logits) {
    if (!logits.empty() && setup_.world.pipeline > 1)
        throw Error(Trouble::usage, {.what = "a pipeline keeps no logits: its last stage alone "
                                             "has them",
                                     .where = "parallel.pipeline",
                                     .measured = std::to_string(setup_.world.pipeline),
                                     .limit = "1",
                                     .remedy = "evaluate on one rank"});
    totals_ = so_far();  // evaluation moves weights too; the run's totals are training's alone
    measure_anew();
    kernels().evaluation_targets() = 0;
    kernels().keep_logits(logits, some_rank_asks(!logits.empty()));
    const int64_t micro_batches = setup_.share.evaluation_micro_batches;
    HeldBack mine;
    for (int64_t done = 0; done < micro_batches; done += steps_->schedules.evaluation_size) {
        kernels().states()[++replayed_.sequence] = {
            .step = now_.step, .held_back_before = setup_.world.replica() * micro_batches + done};
        store().append(steps_->schedules.evaluation, replayed_.sequence, now_.step);
        store().drain();
        mine.add(steps_->judge.held_back(steps_->schedules.evaluation_size));
    }
    kernels().keep_logits({}, false);
    measure_anew();
    mine.targets = kernels().evaluation_targets();
    if (!setup_.world.counts_tokens()) mine.targets = 0, mine.loss_sum = 0;
    HeldBack all = mine;
    if (setup_.ranks) {
        all = {};
        for (const HeldBack& rank : gather(*setup_.ranks, setup_.executor, mine, "evaluation"))
            all.add(rank);
    }
    if (all.finite()) return all.mean();
    finish_save_of_ranks();
    throw diverged(all, plan().layers, setup_.numerics.compute);
}

void Engine::Run::measure() {
    if (setup_.measurements)
        return predict(cost::of_rank(*setup_.measurements, setup_.world.local_ranks));
    totals_ = so_far();  // drained, all buffers are free; what is moved from here is not the run's
    const trace::Recording::Pause pause(setup_.recording);
    kernels().states()[StepStates::kMeasured] = {.step = 1, .gradient_scale = 1};
    const optim::Scalars scalars = steps_->judge.scalars({}, 1.0)[0];
    const std::unique_ptr<Together> together = together_of(setup_);
    cost::Measurements measured = take_measurements(
        steps_->schedules.steady(), stack_->bench(), stack_->teams(), scalars, stack_->arena(),
        setup_.shape().vocab, [&] { return update_rates(scalars, *together); }, *together);
    if (plan().has_feedback()) {  // what codes momentum would overwrite it: it counts as updates
        measured.kernels.seconds.merge(
            time_kernels(kernels_of_momentum(plan()), stack_->bench(), *together).seconds);
        agree_on_slowest(*together, measured);
    }
    time_storage(setup_.config, plan(), store(), setup_.executor, measured);
    comm::Communicator* const timed = setup_.world.pipeline > 1 ? setup_.sharers : setup_.ranks;
    if (timed) time_gathers(stack_->bench(), *timed, measured);
    if (totals_.predicted_seconds == 0)
        log_unlike_assumed(setup_.config, measured, setup_.world.local_ranks);
    predict(measured);
    measure_anew();
}

// In what is left beside the run; or as before the state was filled, where that was in more memory.
UpdateRates Engine::Run::update_rates(const optim::Scalars& scalars, Together& together) {
    const Topology machine = as_left_now(
        stack_->machine(), left_of_budget(setup_.share.budgets, stack_->pool().reserved_bytes()));
    const std::span<std::byte> staging = staging_buffers(plan(), stack_->arena());
    const int64_t now = std::max(std::ssize(staging), machine.memory_left_bytes);
    if (rates_before_fill_ && now < rates_before_fill_->memory_bytes) {
        together.run({}, {});
        return *rates_before_fill_;
    }
    return time_updates(stack_->teams(), machine, scalars, plan(), footprint_of_updates(plan()),
                        staging, together);
}

// With a rate for kernels that nobody has timed.
cost::Measurements Engine::Run::with_rate(cost::Measurements measured) const {
    if (measured.assumed_flops_per_s == 0)
        measured.assumed_flops_per_s = plans_->of_this_rank().machine().assumed_flops_per_s;
    return measured;
}

// With the kernels of every stage, and those that nobody has timed by arithmetic.
cost::Measurements Engine::Run::with_kernels_of_all(cost::Measurements measured) {
    measured = with_rate(std::move(measured));
    measured.kernels = kernels_of_any(*setup_.ranks, setup_.executor, measured.kernels);
    const std::span<const planner::Plan> mine(&plan(), 1);
    add_assumed_kernels(mine, record_stages(mine, false), stack_->decoder(), measured);
    if (plan().speculative)
        add_assumed_kernels(mine, record_stages(mine, true), stack_->decoder(), measured);
    return measured;
}

// Of all stages together, by the first rank's links.
PredictedSeconds Engine::Run::seconds_of_pipeline(const cost::Measurements& measured) {
    PredictedSeconds mine;
    if (setup_.world.rank == 0)
        mine = seconds_of_stages(plans_->of_stages(), stack_->decoder(), measured);
    return gather(*setup_.ranks, setup_.executor, mine, "predicted step").front();
}

void Engine::Run::predict(const cost::Measurements& alone) {
    const bool staged = setup_.world.pipeline > 1;
    const cost::Measurements measured = staged ? with_kernels_of_all(alone) : alone;
    planned_ = predict_all(steps_->schedules, plan(), measured);
    PredictedSeconds seconds = staged ? seconds_of_pipeline(measured) : seconds_of(planned_);
    if (!staged)
        add_momentum(seconds, steps_->schedules, plan(), stack_->decoder(), with_rate(measured));
    note_predicted(totals_, seconds, setup_.share.budgets, plan(), stack_->decoder(),
                   steps_->schedules, measured);
    if (setup_.world.rank == 0)
        log_clipped_otherwise(totals_, plan(), plans_->of_this_rank(), measured);
}

}  // namespace ferry::train
