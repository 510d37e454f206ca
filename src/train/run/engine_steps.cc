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
    const Nanos start = executor_.now();
    StepReport report{.step = ++step_,
                      .tokens = plan_.micro_batches * world_.sharers() * numerics_.tokens()};
    report.targets = loader_->count_targets(step_);
    report.lr = judge_->learning_rate(updates_ + 1);
    if (report.targets == 0) {
        log_warn("step " + std::to_string(step_) + " has no real target and is skipped");
        report.skipped = true;
    } else {
        replay(report);
    }
    const auto seconds = [&] { return static_cast<double>(executor_.now() - start) * 1e-9; };
    report.seconds = seconds();  // as far as its record can know
    last_ = report;
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
    exchanged_ = what;
    if (what == Exchanged::gradients) return;
    const Nanos start = executor_.now();
    const bool off = has_errors(moment_updates_);
    momentum_->begin(*state_, off);
    if (world_.rank != 0 || off) return;
    const bool onebit = config_.optimizer.method == optim::Method::onebit_adam;
    log_info(
        fmt::format("step {}: from here on ranks {}exchange their momentum as {}{}; getting "
                    "there took {:.2f} s",
                    step_, onebit ? "" : "at times ", text_of(partition_.codecs.momentum),
                    onebit ? ", and the second moment stays" : "",
                    static_cast<double>(executor_.now() - start) * 1e-9));
}

const swap::Schedule& Engine::Run::next_schedule(bool speculative) const {
    return exchanged_ == Exchanged::gradients ? schedules_.step(previous_, speculative)
                                              : schedules_.step_by_momentum(previous_);
}

void Engine::Run::replay(StepReport& report) {
    const Exchanged next = judge_->exchanged_after(moment_updates_);
    if ((next == Exchanged::gradients) != (exchanged_ == Exchanged::gradients)) change_over(next);
    exchanged_ = next;
    StepState& state = kernels().states()[++sequence_];
    const double scale = report.loss_scale = loss_scale_.value();
    state = {.step = step_,
             .gradient_scale = static_cast<float>(scale / static_cast<double>(report.targets))};
    // What a checkpoint is read from is updated no sooner than it must be.
    if (previous_ != Previous::none) await_reading();
    report.speculative = plan_.speculative && judge_->speculates_now() &&
                         exchanged_ == Exchanged::gradients && !(save_ && save_->reads()) &&
                         !hands_over();
    if (report.speculative)
        state.speculative = judge_->scalars({updates_ + 1, moment_updates_ + 1}, 1 / scale);
    const swap::Schedule& schedule = next_schedule(report.speculative);
    log_debug(fmt::format("step {} replays \"{}\": {} tasks, {} waits", step_, schedule.name,
                          schedule.tasks.size(), schedule.waits.size()));
    if (recording_ && exchanged_ == Exchanged::gradients)  // the other sort is not predicted
        rows_->lanes.record(schedule,
                            planned_[static_cast<size_t>(previous_)][report.speculative ? 1 : 0],
                            executor_.now(), step_);
    await_durable();
    store().append(schedule, sequence_, step_);
    if (plan_.durable) store().publish(committed_);
    store().run_to_outcome();
    const std::array<RankReport, 1> mine{ranks_ ? RankReport{} : judge_->report()};
    const Outcome outcome =
        judge_->judge(lane_ ? lane_->reports() : mine, report.targets, scale, exchanged_);
    report.loss = outcome.loss;
    report.gradient_norm = outcome.norm;
    report.clip_factor = outcome.clip_factor;
    if (!outcome.finite) return skip_or_stop(report, outcome);
    loss_scale_.good_step();
    skipped_in_a_row_ = 0;
    ++updates_;
    ++moment_updates_;
    totals_.momentum_steps += exchanged_ == Exchanged::momentum;
    totals_.local_steps += exchanged_ == Exchanged::nothing;
    state.after_outcome = judge_->scalars({updates_, moment_updates_}, outcome.clip_factor / scale);
    if (exchanged_ != Exchanged::gradients)
        state.momentum_share =
            judge_->momentum_share({updates_, moment_updates_}, outcome.clip_factor / scale);
    report.committed = report.speculative && outcome.clip_factor == 1;
    previous_ = exchanged_ == Exchanged::nothing ? Previous::alone
                : !report.speculative            ? Previous::not_speculative
                : report.committed               ? Previous::committed
                                                 : Previous::rolled_back;
}

// The updates that come now are written where the durable step before the last one lies. That
// one stays until all ranks have the last: whichever of them is killed, all have one in common.
void Engine::Run::await_durable() {
    if (!config_.checkpoint.durable_steps || !ranks_) return;
    store().wait_published();
    gather(*ranks_, executor_, step_, "durable steps");
}

void Engine::Run::skip_or_stop(StepReport& report, const Outcome& outcome) {
    previous_ = report.speculative ? Previous::dropped : Previous::none;
    report.skipped = true;
    // Scaling cannot cure a forward pass; a gradient that overflowed is what it is there for.
    if (loss_scale_.scales() && outcome.forward_was_finite) return loss_scale_.overflow(step_);
    if (!loss_scale_.scales() && config_.on_nonfinite == OnNonfinite::skip &&
        ++skipped_in_a_row_ < kSkipsMost)
        return;
    finish_save_of_ranks();
    throw diverged(
        config_, outcome,
        {.where = "step " + std::to_string(step_) + ", " + place_of(outcome, plan_.layers),
         .last_good_step = step_ - std::max<int64_t>(skipped_in_a_row_, 1),
         .scales = loss_scale_.scales(),
         .skipped_in_a_row = skipped_in_a_row_});
}

void Engine::Run::go_on_from(const RunState& found) {
    step_ = found.step;
    updates_ = found.updates;
    moment_updates_ = found.moment_updates;
    if (moment_updates_ > 0) exchanged_ = judge_->exchanged_after(moment_updates_ - 1);
    loss_scale_.resume(found.loss_scale);
    skipped_in_a_row_ = found.skipped_in_a_row;
    judge_->resume(found.unclipped_in_a_row);
    frozen_ = found.frozen;
    last_ = resumed_ = found.report;
}

RunState Engine::Run::run_state() const {
    return {.step = step_,
            .updates = updates_,
            .moment_updates = moment_updates_,
            .loss_scale = loss_scale_.state(),
            .skipped_in_a_row = skipped_in_a_row_,
            .unclipped_in_a_row = judge_->unclipped_in_a_row(),
            .frozen = frozen_,
            .report = last_};
}

// How far the run has come: for whoever finds its files, and to go on from there.
void Engine::Run::note_committed() {
    last_good_ = step_;
    if (volume()) volume()->note_step(step_);
    if (!plan_.durable) return;
    look_for_files();
    committed_ = record_.write(run_state(), plan_.record_bytes - swap::map_bytes(plan_.objects));
}

// The run goes on without them, and nothing of it outlives the process.
void Engine::Run::look_for_files() {
    if (!plan_.durable || !removed_.empty()) return;
    removed_ = volume()->missing();
    if (!removed_.empty()) log_warn(nothing_durable(removed_, last_good_).what());
}

// Finishes the last step, to the last byte that is to be durable; its time is the steps'.
void Engine::Run::drain() {
    await_reading();
    finish_last_step();
}

void Engine::Run::finish_last_step() {
    const Nanos start = executor_.now();
    const bool publishes = plan_.durable && durable_step_ != step_;
    // Behind a skipped step, too: a record goes over the one before the last.
    if (previous_ != Previous::none || publishes) await_durable();
    if (previous_ != Previous::none) {
        kernels().states()[++sequence_] = {.step = step_};
        store().append(schedules_.drain(previous_, exchanged_), sequence_, step_);
        previous_ = Previous::none;
    }
    if (publishes) {
        store().publish(committed_);
        durable_step_ = step_;
    }
    store().drain();
    totals_.seconds += static_cast<double>(executor_.now() - start) * 1e-9;
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
