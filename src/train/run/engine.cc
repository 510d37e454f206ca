#include "ferry/train.h"

#include <spdlog/fmt/fmt.h>

#include <algorithm>
#include <cmath>
#include <exception>
#include <functional>
#include <optional>

#include "base/checksum.h"
#include "clipped_share.h"
#include "cost/traffic.h"
#include "outcome.h"
#include "run_report.h"
#include "started_run.h"
#include "train/inside.h"
#include "train/loss_scale.h"
#include "train/prediction/measure.h"
#include "train/prediction/planning_measurements.h"
#include "train/rank_agreement.h"
#include "train/saving/background_save.h"
#include "train/saving/durable.h"
#include "train/saving/save.h"
#include "train/schedules.h"
#include "train/stack/memory_left.h"
#include "train/state/joined_slices.h"
#include "train/state/shared_values.h"
#include "train/state/state_io.h"
#include "train/step_kernels.h"

namespace ferry::train {

using planner::Plan;

// Takes the steps of a run that has been started.
class Engine::Run : private StartedRun {
public:
    Run(const Config& config, const Runtime& runtime, std::shared_ptr<ComputeContext> context)
        : StartedRun(config, runtime, std::move(context)) {
        go_on_from(found_);
        note_committed();
        drain();
        totals_ = {};
        measure_anew();
    }

    ~Run() {
        // An error of the caller's, who has not said which: the others would wait for this rank.
        if (std::uncaught_exceptions() > exceptions_) context_->abandon("raised between its steps");
    }

    StepReport step() {
        load(step_ + 1);
        return guarded([this] { return next_step(); });
    }

    int64_t last_step() const { return step_; }
    const StepReport* resumed_step() const { return resumed_.step > 0 ? &resumed_ : nullptr; }

    Evaluation evaluate(std::span<float> logits) {
        load(0);
        return guarded([&] { return held_back(logits); });
    }

    void begin_save(const Saving& saving) {
        FERRY_CHECK(!save_, "a checkpoint is on its way");
        guarded([&] {
            Saving whole = saving;
            if (!whole.progress && progress_) whole.progress = told_progress();
            if (begin_passing(whole)) return;
            drain();
            if (saving.started) saving.started();
            if (saving.begun) saving.begun();
            const bool gathers = ranks_ && !saves_beside();
            const bool may = !gathers && !checkpoint_room_.empty() && reads_meanwhile(plan_);
            Team* const copiers = may ? copiers_or_none() : nullptr;
            Team& team = copiers ? *copiers : stack_.teams().all();
            state_->begin_arrays(team);
            const ReadArrays read = gathers ? reader() : own_reader();
            whole.errors = has_errors(moment_updates_);
            if (gathers && world_.rank != 0)
                return read_checkpoint(
                    plan_, layers_, whole.errors, read,
                    [](std::span<const std::span<const std::byte>>) {}, [] { return true; });
            save_ = std::make_unique<BackgroundSave>(plan_, layers_, unwritten(saving), whole,
                                                     checkpoint_room_, team, rows_->checkpoint,
                                                     nullptr, joiner());
            waited_ = saving.waited;
            try {
                if (!copiers || !save_->begin_reading(read)) save_->read(read, gathers);
            } catch (const std::exception& error) {
                drop_save(error.what());
                throw;
            }
        });
    }

    bool save_ended() const { return !save_ || save_->ended(); }

    std::optional<Error> end_save() {
        if (!save_) return std::nullopt;
        guarded([this] { await_reading(); });
        auto failed = save_->end();
        save_.reset();
        return failed;
    }

    uint64_t state_hash() {
        return guarded([this] {
            drain();
            uint64_t mine = state_->hash();
            if (has_errors(moment_updates_)) mine = momentum_->hash(mine);
            if (!ranks_) return mine;
            const std::vector<uint64_t> all = gather(*ranks_, executor_, mine, "state hash");
            return checksum(std::as_bytes(std::span(all)));
        });
    }

    void read_tensor(int64_t layer, const model::Tensor& tensor, const ValueSink& sink) {
        guarded([&] {
            drain();
            read(layer, tensor, sink, [&](const zero::Run& run, const ValueSink& to) {
                state_->read(layer, run.first, run.count, to);
            });
        });
    }

    void read_gradient(int64_t layer, const model::Tensor& tensor, const ValueSink& sink) {
        guarded([&] {
            await_reading();
            store().drain();
            read(layer, tensor, sink, [&](const zero::Run& run, const ValueSink& to) {
                state_->read_gradient(layer, run.first, run.count, to);
            });
        });
    }

    bool any(bool mine) {
        if (!ranks_) return mine;
        return guarded([&] {
            const auto all = gather(*ranks_, executor_, static_cast<uint8_t>(mine), "wishes");
            return std::ranges::any_of(all, [](uint8_t wish) { return wish != 0; });
        });
    }

    std::optional<Error> error_of_any(const std::optional<Error>& mine) {
        if (!ranks_) return mine;
        return guarded([&] { return train::error_of_any(*ranks_, executor_, mine); });
    }

    std::optional<Error> on_first_rank(const std::function<void()>& body) {
        std::optional<Error> mine;
        try {
            if (world_.rank == 0) body();
        } catch (const Error& error) {
            mine = error;
        } catch (const std::exception& error) {
            context_->abandon(error.what());
            throw;
        }
        return error_of_any(mine);
    }

    void measure_bound() {
        guarded([this] { measure(); });
    }
    void abandon(const char* why) noexcept { context_->abandon(why); }

    const Plan& plan() const { return plan_; }
    const std::vector<model::Layer>& layers() const { return layers_; }
    using StartedRun::numerics_record;
    RunReport report() {
        return guarded([this] { return so_far(); });
    }

private:
    // The others hear at once what ends this rank. Its files tell who finds them what storage lost.
    template <class Work>
    std::invoke_result_t<Work> guarded(const Work& work) {
        try {
            return work();
        } catch (const std::exception& error) {
            context_->abandon(error.what());
            if (volume() && is_of_storage(error)) volume()->note_lost();
            throw_again_at(
                {step_, last_good_, volume() != nullptr, plan_.durable, store().what_was_wrong()});
        }
    }

    // Before a step or, with 0, an evaluation begins: what a program's batches run into leaves one
    // rank as it was. Of several the others could not go on.
    void load(int64_t step) {
        try {
            loader_->load(step);
        } catch (const std::exception& error) {
            context_->abandon(error.what());
            throw;
        } catch (...) {
            context_->abandon("its program's batch failed");
            throw;
        }
        if (!ranks_ || loader_->info().count > 0) return;
        guarded([&] { require_same_batch(*ranks_, executor_, step, loader_->loaded_sum()); });
    }

    void measure_anew() {
        store().reset_report();
        if (lane_) lane_->count_anew();
        for (const auto* exchange : {&of_sequences_, &of_tensors_})
            if (*exchange) (*exchange)->count_anew();
        if (momentum_) momentum_->count_anew();
    }

    RunReport so_far() {
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

    StepReport next_step() {
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

    // Ranks that share the tables put logits together.
    bool some_rank_asks(bool mine) {
        if (world_.slicing().ranks == 1) return mine;
        const auto all = gather(*ranks_, executor_, static_cast<uint8_t>(mine), "evaluation");
        return std::ranges::any_of(all, [](uint8_t asks) { return asks != 0; });
    }

    // Each rank goes through as many micro-batches, the last ones perhaps without a target.
    Evaluation held_back(std::span<float> logits) {
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
            for (const HeldBack& rank : gather(*ranks_, executor_, mine, "evaluation"))
                all.add(rank);
        }
        if (all.finite()) return all.mean();
        finish_save_of_ranks();
        throw diverged(all, plan_.layers, numerics_.compute);
    }

    // Who has a layer, of any stage, as this rank has its own: the same slice of it.
    comm::Communicator& of_all_stages() const {
        return context_->of_all_stages ? *context_->of_all_stages : *ranks_;
    }
    // Of these, the first of the stage that updates a layer.
    int first_rank_with(int64_t layer) const {
        return world_.sharers() * stage_with(stages_, layer);
    }

    // A tensor's values: this rank's, or its owners'; of slices, the whole tensor's.
    void read(int64_t layer, const model::Tensor& tensor, const ValueSink& sink,
              const Source& mine) {
        const auto of_slice = [&](const zero::Run& run, const ValueSink& to) {
            const model::Layer& shape = layers_[static_cast<size_t>(layer)];
            if (world_.pipeline > 1)
                return share_values(of_all_stages(), executor_, partition_, shape, run, mine, to,
                                    first_rank_with(layer));
            if (!sharers_) return mine(run, to);
            share_values(*sharers_, executor_, partition_, shape, run, mine, to);
        };
        if (!tensor.is_slice()) return of_slice({tensor.offset, tensor.count}, sink);
        join_slices(*ranks_, executor_, {shape_, world_.slicing()}, tensor, of_slice, sink);
    }

    // Also of a layer that another stage updates.
    std::vector<Width> widths_of(int64_t layer, const model::Tensor& tensor) const {
        std::vector<Width> widths;
        for (const StateArray& array :
             state_arrays_of(plan_, layers_[static_cast<size_t>(layer)], tensor))
            widths.push_back(array.width);
        return widths;
    }

    // The same of all arrays of its state.
    void read_arrays(int64_t layer, const model::Tensor& tensor, const ArraySink& sink) {
        const zero::Run whole{tensor.offset, tensor.count};
        const auto mine = [&](const zero::Run& run, const ArraySink& to) {
            state_->read_arrays(layer, run.first, run.count, to);
        };
        if (!ranks_) return mine(whole, sink);
        const model::Layer& shape = layers_[static_cast<size_t>(layer)];
        const std::vector<Width> widths = widths_of(layer, tensor);
        const auto of_slice = [&](const zero::Run& run, const ArraySink& to) {
            if (world_.pipeline > 1)
                return share_arrays(of_all_stages(), executor_, partition_, shape, run, widths,
                                    mine, to, first_rank_with(layer));
            if (!sharers_) return mine(run, to);
            share_arrays(*sharers_, executor_, partition_, shape, run, widths, mine, to);
        };
        if (!tensor.is_slice()) return of_slice(whole, sink);
        join_arrays(*ranks_, executor_, {shape_, world_.slicing()}, tensor, widths, of_slice, sink);
    }

    ReadArrays reader() {
        return
            [this](int64_t layer, const model::Tensor& tensor, Kept what, const ArraySink& sink) {
                if (what == Kept::errors) return momentum_->read_errors(layer, tensor, sink);
                read_arrays(layer, tensor, sink);
            };
    }

    // Whether each rank reads its part alone, and a thread of it sends that to the first rank's: of
    // all ranks alike.
    bool saves_beside() const { return context_->saving && reads_own_part(plan_); }

    ReadArrays own_reader() {
        return [this](int64_t layer, const model::Tensor& tensor, Kept, const ArraySink& sink) {
            const zero::Run own = own_run(partition_, plan_.layers[static_cast<size_t>(layer)],
                                          {tensor.offset, tensor.count});
            if (own.count > 0) state_->read_arrays(layer, own.first, own.count, sink);
        };
    }

    JoinParts joiner() {
        if (!ranks_ || !saves_beside()) return {};
        return [this](int64_t layer, const model::Tensor& tensor, const ArraySource& mine,
                      const ArraySink& sink) {
            share_arrays(*context_->saving, *context_->saving_executor, partition_,
                         plan_.layers[static_cast<size_t>(layer)], {tensor.offset, tensor.count},
                         widths_of(layer, tensor), mine, sink);
        };
    }

    // The other ranks hear of it first: their threads wait for this rank's part.
    void drop_save(const char* why) noexcept {
        if (ranks_) context_->abandon(why);
        save_->stop();
        save_.reset();
    }

    // Where all ranks end by an error that is not the checkpoint's: it is written all the same, as
    // one rank's is.
    void finish_save_of_ranks() {
        if (!ranks_ || !save_) return;
        if (const auto failed = save_->end()) log_warn(failed->what());
    }

    // Whether the updates that are still to come are those of all chunks.
    bool updates_all() const {
        return previous_ == Previous::not_speculative || previous_ == Previous::rolled_back;
    }

    // Whether updates can hand over all that this rank has of a checkpoint. Of ranks whose updates
    // wait for room each would wait for the others'.
    bool can_pass() const {
        if (executor_.simulated() || !passes_by(plan_)) return false;
        return !ranks_ ||
               (saves_beside() && std::ssize(checkpoint_room_) >= own_checkpoint_bytes(plan_));
    }

    // A checkpoint of state that lies in storage, all or some of it: the updates that finish its
    // step hand it over, so that nothing is read for it. False: it cannot be had so.
    bool begin_passing(const Saving& saving) {
        if (!updates_all() || !can_pass()) return false;
        Team* const copiers = copiers_or_none();
        if (!copiers) return false;
        const auto passing = std::make_shared<PassingState>(plan_);
        save_ = std::make_unique<BackgroundSave>(plan_, layers_, unwritten(saving), saving,
                                                 checkpoint_room_, *copiers, rows_->checkpoint,
                                                 passing, joiner());
        state_->begin_arrays(*copiers, passing.get());
        try {
            if (!save_->begin_reading(own_reader())) {  // not of ranks, which throw
                save_->stop();
                save_.reset();
                return false;
            }
            if (saving.started) saving.started();
            kernels().tell_of_updates(passing);
            finish_last_step();
        } catch (const std::exception& error) {
            drop_save(error.what());
            throw;
        }
        kernels().tell_of_updates(nullptr);
        passing->end();
        waited_ = saving.waited;
        if (saving.begun) saving.begun();
        if (waited_) waited_(passing->held_back_seconds());
        return true;
    }

    // Of a checkpoint, to the runtime's program.
    std::function<void(int64_t, int64_t)> told_progress() {
        return [this, told = Nanos{}, last = int64_t{-1}](int64_t bytes, int64_t of) mutable {
            constexpr Nanos kBetween = 100'000'000;
            const Nanos now = executor_.now();
            if (bytes == last || (bytes < of && now - told < kBetween)) return;
            told = now;
            last = bytes;
            progress_("checkpoint", bytes, of);
        };
    }

    Unwritten unwritten(const Saving& saving) const {
        Unwritten made{.description = description_};
        note_run(run_state(), made.manifest);
        checkpoint::Manifest& manifest = made.manifest;
        const int64_t sequences = config_.batch.micro_batches * config_.batch.micro_batch;
        manifest.steps = config_.steps;
        manifest.sequences = step_ * sequences;
        manifest.tokens = manifest.sequences * config_.batch.sequence;
        manifest.ferry = saving.program;
        manifest.model = config_.model.path;
        manifest.training = checkpoint_identity_;
        manifest.numerics = numerics_record();
        manifest.numerics_hash = numerics_id();
        manifest.ranks = world_.ranks;
        // Behind a local step each rank evaluated weights of its own, and none of them is saved.
        const bool alone = moment_updates_ > 0 &&
                           judge_->exchanged_after(moment_updates_ - 1) == Exchanged::nothing;
        if (saving.held_back_loss && !alone) manifest.held_back = {step_, *saving.held_back_loss};
        return made;
    }

    void measure();
    UpdateRates update_rates(const optim::Scalars& scalars);
    void predict(const cost::Measurements& measured);

    // What the step before left is finished. Where momentum is exchanged from here on, every rank
    // gets all of it.
    void change_over(Exchanged what) {
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

    const swap::Schedule& next_schedule(bool speculative) const {
        return exchanged_ == Exchanged::gradients ? schedules_.step(previous_, speculative)
                                                  : schedules_.step_by_momentum(previous_);
    }

    void replay(StepReport& report) {
        const Exchanged next = judge_->exchanged_after(moment_updates_);
        if ((next == Exchanged::gradients) != (exchanged_ == Exchanged::gradients))
            change_over(next);
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
            rows_->lanes.record(
                schedule, planned_[static_cast<size_t>(previous_)][report.speculative ? 1 : 0],
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
        state.after_outcome =
            judge_->scalars({updates_, moment_updates_}, outcome.clip_factor / scale);
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
    void await_durable() {
        if (!config_.checkpoint.durable_steps || !ranks_) return;
        store().wait_published();
        gather(*ranks_, executor_, step_, "durable steps");
    }

    // Until all of the state is read for a checkpoint that is on its way.
    void await_reading() {
        if (!save_ || !save_->reads()) return;
        const Nanos start = executor_.now();
        save_->end_reading();
        if (waited_) waited_(static_cast<double>(executor_.now() - start) * 1e-9);
    }

    // Whether a checkpoint follows this step and gets its state from the updates: all of them then
    // come behind it. An evaluation or a hash between the two finishes the updates first.
    bool hands_over() const {
        return !config_.checkpoint.dir.empty() && saves_behind(config_, step_) &&
               !drains_before_checkpoint(config_, step_) && can_pass();
    }

    // Null: there are no threads for it to be had.
    Team* copiers_or_none() {
        try {
            if (!copiers_)
                copiers_.emplace(std::min(kMeanwhileThreads, stack_.teams().all().threads()));
            return &*copiers_;
        } catch (const Error&) {
            return nullptr;
        }
    }

    void skip_or_stop(StepReport& report, const Outcome& outcome) {
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

    void go_on_from(const RunState& found) {
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

    RunState run_state() const {
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
    void note_committed() {
        last_good_ = step_;
        if (volume()) volume()->note_step(step_);
        if (!plan_.durable) return;
        look_for_files();
        committed_ =
            record_.write(run_state(), plan_.record_bytes - swap::map_bytes(plan_.objects));
    }

    // The run goes on without them, and nothing of it outlives the process.
    void look_for_files() {
        if (!plan_.durable || !removed_.empty()) return;
        removed_ = volume()->missing();
        if (!removed_.empty()) log_warn(nothing_durable(removed_, last_good_).what());
    }

    // Finishes the last step, to the last byte that is to be durable; its time is the steps'.
    void drain() {
        await_reading();
        finish_last_step();
    }

    void finish_last_step() {
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

    void note(const StepReport& report) {
        ++totals_.steps;
        totals_.tokens += report.skipped ? 0 : report.tokens;
        totals_.seconds += report.seconds;
        totals_.skipped_steps += report.skipped;
        totals_.clipped_steps += report.clip_factor < 1;
        if (report.speculative)
            ++(report.committed ? totals_.steps_committed : totals_.steps_rolled_back);
    }

    StepKernels& kernels() { return stack_.kernels(); }

    const int exceptions_ = std::uncaught_exceptions();
    StepReport last_{};      // the last step's
    StepReport resumed_{};   // that of the step after which the run was resumed
    std::string removed_{};  // a file of the durable state that was removed under the run
    int64_t last_good_ = 0, sequence_ = 0, durable_step_ = -1;
    int64_t updates_ = 0, moment_updates_ = 0;  // of the weights, and what moments took in
    std::span<const std::byte> committed_{};    // the record of the last step
    Timelines planned_{};                       // once the bound is known
    LossScale loss_scale_ = first_loss_scale();
    int64_t skipped_in_a_row_ = 0;
    uint64_t frozen_ = 0;  // hash of the frozen weights
    Previous previous_ = Previous::none;
    Exchanged exchanged_ = Exchanged::gradients;  // between ranks, in the last step
    RunReport totals_{};
    std::optional<Team> copiers_{};           // of a checkpoint's state, while a step is taken
    std::function<void(double)> waited_{};    // of the checkpoint on its way
    std::unique_ptr<BackgroundSave> save_{};  // reads the plan, the room and the teams' threads
};

void Engine::Run::measure() {
    if (measurements_) return predict(cost::of_rank(*measurements_, world_.local_ranks));
    totals_ = so_far();  // drained, all buffers are free; what is moved from here is not the run's
    const trace::Recording::Pause pause(recording_);
    kernels().states()[StepStates::kMeasured] = {.step = 1, .gradient_scale = 1};
    const optim::Scalars scalars = judge_->scalars({}, 1.0)[0];
    cost::Measurements measured =
        take_measurements(schedules_.steady(), stack_.bench(), stack_.teams(), scalars,
                          stack_.arena(), shape_.vocab, [&] { return update_rates(scalars); });
    time_storage(config_, plan_, store(), executor_, measured);
    comm::Communicator* const timed = world_.pipeline > 1 ? sharers_ : ranks_;
    if (timed) time_gathers(stack_.bench(), *timed, measured);
    if (totals_.predicted_seconds == 0) log_unlike_assumed(config_, measured, world_.local_ranks);
    predict(measured);
    measure_anew();
}

// In what is left beside the run; or as before the state was filled, where that was in more memory.
UpdateRates Engine::Run::update_rates(const optim::Scalars& scalars) {
    const Topology machine = as_left_now(
        stack_.machine(), left_of_budget(share_.budgets, stack_.pool().reserved_bytes()));
    const std::span<std::byte> staging = staging_buffers(plan_, stack_.arena());
    const int64_t now = std::max(std::ssize(staging), machine.memory_left_bytes);
    if (rates_before_fill_ && now < rates_before_fill_->memory_bytes) return *rates_before_fill_;
    return time_updates(stack_.teams(), machine, scalars, plan_, footprint_of_updates(plan_),
                        staging);
}

void Engine::Run::predict(const cost::Measurements& measured) {
    planned_ = predict_all(schedules_, plan_, measured);
    note_predicted(totals_, planned_, share_.budgets, plan_, stack_.decoder(), schedules_,
                   measured);
    if (world_.rank == 0) log_clipped_otherwise(totals_, plan_, *planner_, measured);
}

Engine::Engine(std::unique_ptr<Run> run) : run_(std::move(run)) {}

Engine::~Engine() = default;

std::unique_ptr<Engine> Engine::make(const Config& config, Runtime runtime) {
    const auto context = std::make_shared<ComputeContext>();
    try {
        context->open(config, runtime);
        return std::unique_ptr<Engine>(new Engine(std::make_unique<Run>(config, runtime, context)));
    } catch (const std::exception& error) {
        context->abandon(error.what());
        throw;
    }
}

void on_stuck(std::function<void(const Error&)> instead) { comm::on_stuck(std::move(instead)); }

bool Engine::any(bool mine) { return run_->any(mine); }
void Engine::abandon(const char* why) noexcept { run_->abandon(why); }
StepReport Engine::step() { return run_->step(); }
int64_t Engine::last_step() const { return run_->last_step(); }
const StepReport* Engine::resumed_step() const { return run_->resumed_step(); }
Evaluation Engine::evaluate(std::span<float> logits) { return run_->evaluate(logits); }
uint64_t Engine::state_hash() { return run_->state_hash(); }
void Engine::measure_bound() { run_->measure_bound(); }
std::string Engine::numerics_record() const { return run_->numerics_record(); }
RunReport Engine::report() { return run_->report(); }

const Plan& Inside::plan() const { return run_.plan(); }
const std::vector<model::Layer>& Inside::layers() const { return run_.layers(); }
void Inside::read_tensor(int64_t layer, const model::Tensor& tensor, const ValueSink& sink) const {
    run_.read_tensor(layer, tensor, sink);
}
void Inside::read_gradient(int64_t layer, const model::Tensor& tensor,
                           const ValueSink& sink) const {
    run_.read_gradient(layer, tensor, sink);
}
std::optional<Error> Inside::save(const Saving& saving) const {
    run_.begin_save(saving);
    return run_.end_save();
}
std::optional<Error> Inside::on_first_rank(const std::function<void()>& body) const {
    return run_.on_first_rank(body);
}
std::optional<Error> Inside::error_of_any(const std::optional<Error>& mine) const {
    return run_.error_of_any(mine);
}
void Inside::begin_save(const Saving& saving) const { run_.begin_save(saving); }
bool Inside::save_ended() const { return run_.save_ended(); }
std::optional<Error> Inside::end_save() const { return run_.end_save(); }

}  // namespace ferry::train
