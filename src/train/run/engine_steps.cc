// How a run takes its steps: which schedule is next, what came of it, and what is committed.
#include <spdlog/fmt/fmt.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <string>

#include "base/log.h"
#include "engine_impl.h"
#include "outcome.h"
#include "train/kernels/step_kernels.h"
#include "train/loss_scale.h"
#include "train/rank_agreement.h"
#include "train/saving/durable.h"
#include "train/step/schedules.h"

namespace ferry::train {

StepReport Engine::Run::next_step() {
    const Nanos start = setup_.executor.now();
    StepReport report{
        .step = ++now_.step,
        .tokens = plan().micro_batches * setup_.world.sharers() * setup_.numerics.tokens()};
    report.targets = setup_.loader->count_targets(now_.step);
    report.lr = steps_->judge.learning_rate(now_.updates + 1);
    if (report.targets == 0) {
        log_warn("step " + std::to_string(now_.step) + " has no real target and is skipped");
        report.skipped = true;
    } else {
        replay(report);
    }
    const auto seconds = [&] { return static_cast<double>(setup_.executor.now() - start) * 1e-9; };
    report.seconds = seconds();  // as far as its record can know
    now_.report = report;
    note_committed();
    report.seconds = seconds();
    note(report);
    return report;
}

// What the step before left is finished. Where momentum is exchanged from here on, every rank
// gets all of it.
void Engine::Run::change_over(Exchanged what) {
    const double before = totals_.seconds;
    drain();
    totals_.seconds = before;  // the step that is to come counts it
    replayed_.exchanged = what;
    if (what == Exchanged::gradients) return;
    const Nanos start = setup_.executor.now();
    const bool off = has_errors(now_.moment_updates);
    momentum_->begin(*state_, off);
    if (setup_.world.rank != 0 || off) return;
    const bool onebit = setup_.config.optimizer.method == optim::Method::onebit_adam;
    log_info(fmt::format(
        "step {}: from here on ranks {}exchange their momentum as {}{}; getting "
        "there took {:.2f} s",
        now_.step, onebit ? "" : "at times ", text_of(plans_->cut().partition.codecs.momentum),
        onebit ? ", and the second moment stays" : "",
        static_cast<double>(setup_.executor.now() - start) * 1e-9));
}

const swap::Schedule& Engine::Run::next_schedule(bool speculative) const {
    return replayed_.exchanged == Exchanged::gradients
               ? steps_->schedules.step(replayed_.previous, speculative)
               : steps_->schedules.step_by_momentum(replayed_.previous);
}

void Engine::Run::replay(StepReport& report) {
    const Exchanged next = steps_->judge.exchanged_after(now_.moment_updates);
    if ((next == Exchanged::gradients) != (replayed_.exchanged == Exchanged::gradients))
        change_over(next);
    replayed_.exchanged = next;
    StepState& state = kernels().states()[++replayed_.sequence];
    const double scale = report.loss_scale = loss_scale_.value();
    state = {.step = now_.step,
             .gradient_scale = static_cast<float>(scale / static_cast<double>(report.targets))};
    // What a checkpoint is read from is updated no sooner than it must be.
    if (replayed_.previous != Previous::none) await_reading();
    report.speculative = plan().speculative && steps_->judge.speculates_now() &&
                         replayed_.exchanged == Exchanged::gradients &&
                         !(checkpoint_.save && checkpoint_.save->reads()) && !hands_over();
    if (report.speculative)
        state.speculative =
            steps_->judge.scalars({now_.updates + 1, now_.moment_updates + 1}, 1 / scale);
    const swap::Schedule& schedule = next_schedule(report.speculative);
    log_debug(fmt::format("step {} replays \"{}\": {} tasks, {} waits", now_.step, schedule.name,
                          schedule.tasks.size(), schedule.waits.size()));
    if (setup_.recording &&
        replayed_.exchanged == Exchanged::gradients)  // the other sort is not predicted
        steps_->lane_rows.record(
            schedule, planned_[static_cast<size_t>(replayed_.previous)][report.speculative ? 1 : 0],
            setup_.executor.now(), now_.step);
    await_durable();
    store().append(schedule, replayed_.sequence, now_.step);
    if (plan().durable) store().publish(published_.record);
    store().run_to_outcome();
    const std::array<RankReport, 1> mine{setup_.ranks ? RankReport{} : steps_->judge.report()};
    const Outcome outcome = steps_->judge.judge(steps_->lane ? steps_->lane->reports() : mine,
                                                report.targets, scale, replayed_.exchanged);
    report.loss = outcome.loss;
    report.gradient_norm = outcome.norm;
    report.clip_factor = outcome.clip_factor;
    if (!outcome.finite) return skip_or_stop(report, outcome);
    loss_scale_.good_step();
    now_.skipped_in_a_row = 0;
    ++now_.updates;
    ++now_.moment_updates;
    totals_.momentum_steps += replayed_.exchanged == Exchanged::momentum;
    totals_.local_steps += replayed_.exchanged == Exchanged::nothing;
    state.after_outcome =
        steps_->judge.scalars({now_.updates, now_.moment_updates}, outcome.clip_factor / scale);
    if (replayed_.exchanged != Exchanged::gradients)
        state.momentum_share = steps_->judge.momentum_share({now_.updates, now_.moment_updates},
                                                            outcome.clip_factor / scale);
    report.committed = report.speculative && outcome.clip_factor == 1;
    replayed_.previous = replayed_.exchanged == Exchanged::nothing ? Previous::alone
                         : !report.speculative                     ? Previous::not_speculative
                         : report.committed                        ? Previous::committed
                                                                   : Previous::rolled_back;
}

// The updates that come now are written where the durable step before the last one lies. That
// one stays until all ranks have the last: whichever of them is killed, all have one in common.
void Engine::Run::await_durable() {
    if (!setup_.config.checkpoint.durable_steps || !setup_.ranks) return;
    store().wait_published();
    gather(*setup_.ranks, setup_.executor, now_.step, "durable steps");
}

void Engine::Run::skip_or_stop(StepReport& report, const Outcome& outcome) {
    replayed_.previous = report.speculative ? Previous::dropped : Previous::none;
    report.skipped = true;
    // Scaling cannot cure a forward pass; a gradient that overflowed is what it is there for.
    if (loss_scale_.scales() && outcome.forward_was_finite) return loss_scale_.overflow(now_.step);
    if (!loss_scale_.scales() && setup_.config.on_nonfinite == OnNonfinite::skip &&
        ++now_.skipped_in_a_row < kSkipsMost)
        return;
    finish_save_of_ranks();
    throw diverged(
        setup_.config, outcome,
        {.where = "step " + std::to_string(now_.step) + ", " + place_of(outcome, plan().layers),
         .last_good_step = now_.step - std::max<int64_t>(now_.skipped_in_a_row, 1),
         .scales = loss_scale_.scales(),
         .skipped_in_a_row = now_.skipped_in_a_row});
}

// From where the run was left, which may be its beginning.
void Engine::Run::go_on() {
    if (now_.moment_updates > 0)
        replayed_.exchanged = steps_->judge.exchanged_after(now_.moment_updates - 1);
    loss_scale_.resume(now_.loss_scale);
    steps_->judge.resume(now_.unclipped_in_a_row);
    resumed_ = now_.report;
}

RunState Engine::Run::run_state() const {
    RunState state = now_;
    state.loss_scale = loss_scale_.state();
    state.unclipped_in_a_row = steps_->judge.unclipped_in_a_row();
    return state;
}

// How far the run has come: for whoever finds its files, and to go on from there.
void Engine::Run::note_committed() {
    last_good_ = now_.step;
    if (volume()) volume()->note_step(now_.step);
    if (!plan().durable) return;
    look_for_files();
    published_.record =
        record_->write(run_state(), plan().record_bytes - swap::map_bytes(plan().objects));
}

// The run goes on without them, and nothing of it outlives the process.
void Engine::Run::look_for_files() {
    if (!plan().durable || !published_.removed.empty()) return;
    published_.removed = volume()->missing();
    if (!published_.removed.empty())
        log_warn(nothing_durable(published_.removed, last_good_).what());
}

// Finishes the last step, to the last byte that is to be durable; its time is the steps'.
void Engine::Run::drain() {
    await_reading();
    finish_last_step();
}

void Engine::Run::finish_last_step() {
    const Nanos start = setup_.executor.now();
    const bool publishes = plan().durable && published_.step != now_.step;
    // Behind a skipped step, too: a record goes over the one before the last.
    if (replayed_.previous != Previous::none || publishes) await_durable();
    if (replayed_.previous != Previous::none) {
        kernels().states()[++replayed_.sequence] = {.step = now_.step};
        store().append(steps_->schedules.drain(replayed_.previous, replayed_.exchanged),
                       replayed_.sequence, now_.step);
        replayed_.previous = Previous::none;
    }
    if (publishes) {
        store().publish(published_.record);
        published_.step = now_.step;
    }
    store().drain();
    totals_.seconds += static_cast<double>(setup_.executor.now() - start) * 1e-9;
}

void Engine::Run::note(const StepReport& report) {
    ++totals_.steps;
    totals_.tokens += report.skipped ? 0 : report.tokens;
    totals_.seconds += report.seconds;
    totals_.skipped_steps += report.skipped;
    totals_.clipped_steps += report.clip_factor < 1;
    if (report.speculative)
        ++(report.committed ? totals_.steps_committed : totals_.steps_rolled_back);
}

}  // namespace ferry::train
