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
#include "train/prediction/measure.h"
#include "train/prediction/planning_measurements.h"
#include "train/prediction/simulated_stages.h"
#include "train/rank_agreement.h"
#include "train/stack/memory_left.h"
#include "train/step/schedules.h"

namespace ferry::train {

void Engine::Run::measure_anew() {
    store().reset_report();
    if (lane_) lane_->count_anew();
    for (const auto* exchange : {&of_sequences_, &of_tensors_})
        if (*exchange) (*exchange)->count_anew();
    if (momentum_) momentum_->count_anew();
}

RunReport Engine::Run::so_far() {
    drain();
    RunReport report = totals_;
    report.model_flops =
        cost::model_flops(plan_.layers, stack_.decoder().shape(), numerics_.whole_sequence(),
                          plan_.micro_batches * numerics_.tokens());
    add_links(report.links, store(), world_.ranks);
    if (lane_) add_collectives(report.collectives, lane_->collectives());
    for (const auto* exchange : {&of_sequences_, &of_tensors_})
        if (*exchange) add_collectives(report.collectives, (*exchange)->sent());
    if (momentum_ && momentum_->sent().calls > 0)
        add_collectives(report.collectives, {momentum_->sent()});
    report.reserved = stack_.reserved();
    if (volume()) report.paths = volume()->counters();
    look_for_files();
    report.removed = removed_;
    return report;
}

// Ranks that share the tables put logits together.
bool Engine::Run::some_rank_asks(bool mine) {
    if (world_.slicing().ranks == 1) return mine;
    const auto all = gather(*ranks_, executor_, static_cast<uint8_t>(mine), "evaluation");
    return std::ranges::any_of(all, [](uint8_t asks) { return asks != 0; });
}

// Each rank goes through as many micro-batches, the last ones perhaps without a target.
Evaluation Engine::Run::held_back(std::span<float> logits) {
    if (!logits.empty() && world_.pipeline > 1)
        throw Error(Trouble::usage, {.what = "a pipeline keeps no logits: its last stage alone "
                                             "has them",
                                     .where = "parallel.pipeline",
                                     .measured = std::to_string(world_.pipeline),
                                     .limit = "1",
                                     .remedy = "evaluate on one rank"});
    totals_ = so_far();  // evaluation moves weights too; the run's totals are training's alone
    measure_anew();
    kernels().evaluation_targets() = 0;
    kernels().keep_logits(logits, some_rank_asks(!logits.empty()));
    const int64_t micro_batches = share_.evaluation_micro_batches;
    HeldBack mine;
    for (int64_t done = 0; done < micro_batches; done += schedules_.evaluation_size) {
        kernels().states()[++sequence_] = {
            .step = step_, .held_back_before = world_.replica() * micro_batches + done};
        store().append(schedules_.evaluation, sequence_, step_);
        store().drain();
        mine.add(judge_->held_back(schedules_.evaluation_size));
    }
    kernels().keep_logits({}, false);
    measure_anew();
    mine.targets = kernels().evaluation_targets();
    if (!world_.counts_tokens()) mine.targets = 0, mine.loss_sum = 0;
    HeldBack all = mine;
    if (ranks_) {
        all = {};
        for (const HeldBack& rank : gather(*ranks_, executor_, mine, "evaluation")) all.add(rank);
    }
    if (all.finite()) return all.mean();
    finish_save_of_ranks();
    throw diverged(all, plan_.layers, numerics_.compute);
}

void Engine::Run::measure() {
    if (measurements_) return predict(cost::of_rank(*measurements_, world_.local_ranks));
    totals_ = so_far();  // drained, all buffers are free; what is moved from here is not the run's
    const trace::Recording::Pause pause(recording_);
    kernels().states()[StepStates::kMeasured] = {.step = 1, .gradient_scale = 1};
    const optim::Scalars scalars = judge_->scalars({}, 1.0)[0];
    const std::unique_ptr<Together> together = this->together();
    cost::Measurements measured = take_measurements(
        schedules_.steady(), stack_.bench(), stack_.teams(), scalars, stack_.arena(), shape_.vocab,
        [&] { return update_rates(scalars, *together); }, *together);
    if (plan_.has_feedback()) {  // what codes momentum would overwrite it: it counts as updates
        measured.kernels.seconds.merge(
            time_kernels(kernels_of_momentum(plan_), stack_.bench(), *together).seconds);
        agree_on_slowest(*together, measured);
    }
    time_storage(config_, plan_, store(), executor_, measured);
    comm::Communicator* const timed = world_.pipeline > 1 ? sharers_ : ranks_;
    if (timed) time_gathers(stack_.bench(), *timed, measured);
    if (totals_.predicted_seconds == 0) log_unlike_assumed(config_, measured, world_.local_ranks);
    predict(measured);
    measure_anew();
}

// In what is left beside the run; or as before the state was filled, where that was in more memory.
UpdateRates Engine::Run::update_rates(const optim::Scalars& scalars, Together& together) {
    const Topology machine = as_left_now(
        stack_.machine(), left_of_budget(share_.budgets, stack_.pool().reserved_bytes()));
    const std::span<std::byte> staging = staging_buffers(plan_, stack_.arena());
    const int64_t now = std::max(std::ssize(staging), machine.memory_left_bytes);
    if (rates_before_fill_ && now < rates_before_fill_->memory_bytes) {
        together.run({}, {});
        return *rates_before_fill_;
    }
    return time_updates(stack_.teams(), machine, scalars, plan_, footprint_of_updates(plan_),
                        staging, together);
}

// With a rate for kernels that nobody has timed.
cost::Measurements Engine::Run::with_rate(cost::Measurements measured) const {
    if (measured.assumed_flops_per_s == 0)
        measured.assumed_flops_per_s = planner_->machine().assumed_flops_per_s;
    return measured;
}

// With the kernels of every stage, and those that nobody has timed by arithmetic.
cost::Measurements Engine::Run::with_kernels_of_all(cost::Measurements measured) {
    measured = with_rate(std::move(measured));
    measured.kernels = kernels_of_any(*ranks_, executor_, measured.kernels);
    const std::span<const planner::Plan> mine(&plan_, 1);
    add_assumed_kernels(mine, record_stages(mine, false), stack_.decoder(), measured);
    if (plan_.speculative)
        add_assumed_kernels(mine, record_stages(mine, true), stack_.decoder(), measured);
    return measured;
}

// Of all stages together, by the first rank's links.
PredictedSeconds Engine::Run::seconds_of_pipeline(const cost::Measurements& measured) {
    PredictedSeconds mine;
    if (world_.rank == 0)
        mine = seconds_of_stages(plans_of_stages(stages_), stack_.decoder(), measured);
    return gather(*ranks_, executor_, mine, "predicted step").front();
}

void Engine::Run::predict(const cost::Measurements& alone) {
    const bool staged = world_.pipeline > 1;
    const cost::Measurements measured = staged ? with_kernels_of_all(alone) : alone;
    planned_ = predict_all(schedules_, plan_, measured);
    PredictedSeconds seconds = staged ? seconds_of_pipeline(measured) : seconds_of(planned_);
    if (!staged) add_momentum(seconds, schedules_, plan_, stack_.decoder(), with_rate(measured));
    note_predicted(totals_, seconds, share_.budgets, plan_, stack_.decoder(), schedules_, measured);
    if (world_.rank == 0) log_clipped_otherwise(totals_, plan_, *planner_, measured);
}

}  // namespace ferry::train
