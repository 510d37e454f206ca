#include "ferry/train.h"

#include <spdlog/fmt/fmt.h>

#include <algorithm>
#include <cmath>
#include <exception>
#include <optional>

#include "base/checksum.h"
#include "clipped_share.h"
#include "cost/traffic.h"
#include "ferry/optim.h"
#include "loader_of.h"
#include "loss_scale.h"
#include "model_of.h"
#include "ops/blas_kernels.h"
#include "outcome.h"
#include "rank_lane.h"
#include "rank_planner.h"
#include "ranks.h"
#include "schedules.h"
#include "step_kernels.h"
#include "train/from_config.h"
#include "train/prediction/measure.h"
#include "train/prediction/planning_measurements.h"
#include "train/stack/memory_left.h"
#include "train/stack/path_rows.h"
#include "train/stack/storage_room.h"
#include "train/stack/threads.h"
#include "train/stack/tier_stack.h"
#include "train/stack/trace_rows.h"
#include "train/stack/volume_options.h"
#include "train/state/background_save.h"
#include "train/state/durable.h"
#include "train/state/imported_state.h"
#include "train/state/loaded_weights.h"
#include "train/state/numerics_record.h"
#include "train/state/resumed_formats.h"
#include "train/state/resumed_kernels.h"
#include "train/state/save.h"
#include "train/state/shared_values.h"
#include "train/state/state_io.h"

namespace ferry::train {

using planner::Plan;

class Engine::Run {
public:
    Run(const Config& config, const Runtime& runtime, std::shared_ptr<ComputeContext> context)
        : context_(std::move(context)),
          ranks_(context_->ranks.get()),
          world_(context_->world()),
          partition_(zero::partition_of(config.zero.stage, world_.rank, world_.ranks)),
          config_(config_of_rank(config, world_)),
          executor_(*runtime.executor),
          device_(*context_->device),
          recording_(runtime.recording),
          measurements_(runtime.measurements),
          hyper_(hyper_of(config)),
          schedule_(schedule_of(config)),
          described_(model_of(config)),
          numerics_(numerics_of(config, shape_)),
          loader_(loader_options(config, shape_, !runtime.only_evaluates, partition_)),
          layers_(layers_of(config, shape_, world_.ranks)),
          saved_(open_saved(config, runtime.checkpoint)),
          loaded_(load(config, runtime)),
          imported_(import(runtime.imported)),
          stack_(ground(config, runtime.resume), TierStack::Model{shape_, numerics_, layers_}),
          record_(identity_of(config, numerics_record(), loader_.info()), config.steps) {
        make_plan(config, runtime);
        if (saved_) prove_saved();
        if (imported_) {
            imported_->require(plan_);
            imported_->prove(stack_.teams().all(), stack_.start_up());
        }
        if (loaded_)
            loaded_->prove(stack_.teams().all(), world_.rank, world_.ranks, stack_.start_up());
        stack_.reserve({.host_budget_bytes = config_.budgets.host_bytes});
        if (world_.rank == 0) reserve_checkpoint_room();
        open(config, runtime);
        if (world_.rank == 0) warn_of_text(config_, described_);
        log_machine(config_, stack_.machine(), device_, executor_);
        if (const std::string rule = muon_rule(config_, layers_); !rule.empty()) log_info(rule);
        if (!executor_.simulated()) log_planned_by(measurements_, config_);
        schedules_.record(plan_, config_.evaluate.micro_batches);
        if (ranks_) require_same_exchanges(*ranks_, executor_, schedules_.all());
        stack_.warm(schedules_.steady(), judge_->scalars(1, 1.0));  // of zeros
        stack_.fill([&] { first_contents(runtime); });
        note_committed();
        drain();
        totals_ = {};
        store().reset_report();
    }

    ~Run() {
        // An error of the caller's, who has not said which: the others would wait for this rank.
        if (std::uncaught_exceptions() > exceptions_) context_->abandon("raised between its steps");
    }

    StepReport step() {
        return guarded([this] { return next_step(); });
    }

    int64_t last_step() const { return step_; }
    const StepReport* resumed_step() const { return resumed_.step > 0 ? &resumed_ : nullptr; }

    Evaluation evaluate(std::span<float> logits) {
        return guarded([&] { return held_back(logits); });
    }

    void begin_save(const Saving& saving) {
        FERRY_CHECK(!save_, "a checkpoint is on its way");
        guarded([&] {
            drain();
            const auto read = [this](int64_t layer, const model::Tensor& tensor,
                                     const ArraySink& sink) { read_arrays(layer, tensor, sink); };
            if (world_.rank != 0)
                return read_checkpoint(
                    plan_, read, [](std::span<const std::span<const std::byte>>) {},
                    [] { return true; });
            save_ = std::make_unique<BackgroundSave>(plan_, unwritten(saving), saving,
                                                     checkpoint_room_, stack_.teams().all());
            try {
                save_->read(read, ranks_ != nullptr);
            } catch (...) {
                save_.reset();
                throw;
            }
        });
    }

    bool save_ended() const { return !save_ || save_->ended(); }

    std::optional<Error> end_save() {
        if (!save_) return std::nullopt;
        auto failed = save_->end();
        save_.reset();
        return failed;
    }

    uint64_t state_hash() {
        return guarded([this] {
            drain();
            const uint64_t mine = state_->hash();
            if (!ranks_) return mine;
            const std::vector<uint64_t> all = gather(*ranks_, executor_, mine, "state hash");
            return checksum(std::as_bytes(std::span(all)));
        });
    }

    void read_tensor(int64_t layer, const model::Tensor& tensor, const Sink& sink) {
        guarded([&] {
            drain();
            read(layer, tensor, sink, [&](const zero::Run& run, const Sink& to) {
                state_->read(layer, run.first, run.count, to);
            });
        });
    }

    void read_gradient(int64_t layer, const model::Tensor& tensor, const Sink& sink) {
        guarded([&] {
            store().drain();
            read(layer, tensor, sink, [&](const zero::Run& run, const Sink& to) {
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

    void measure_bound() {
        guarded([this] { measure(); });
    }
    void abandon(const char* why) noexcept { context_->abandon(why); }

    const Plan& plan() const { return plan_; }
    const std::vector<model::Layer>& layers() const { return plan_.layers; }
    std::string numerics_record() const {
        const std::string machine = machine_text(device_, config_);
        return fmt::format("{:016x} ({})", numerics_hash(config_, shape_, machine, world_.ranks),
                           numerics_text(config_, shape_, machine, world_.ranks));
    }
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

    RunReport so_far() {
        drain();
        RunReport report = totals_;
        report.model_flops = cost::model_flops(plan_.layers, shape_, numerics_.sequence,
                                               plan_.micro_batches * numerics_.tokens());
        add_links(report.links, store(), world_.ranks);
        report.reserved = stack_.reserved();
        if (volume()) report.paths = volume()->counters();
        look_for_files();
        report.removed = removed_;
        return report;
    }

    StepReport next_step() {
        const Nanos start = executor_.now();
        StepReport report{.step = ++step_,
                          .tokens = plan_.micro_batches * world_.ranks * numerics_.tokens()};
        report.targets = loader_.count_targets(step_);
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

    // Each rank goes through as many micro-batches, the last ones perhaps without a target.
    Evaluation held_back(std::span<float> logits) {
        totals_ = so_far();  // evaluation moves weights too; the run's totals are training's alone
        store().reset_report();
        kernels().evaluation_targets() = 0;
        kernels().keep_logits(logits);
        const int64_t micro_batches = config_.evaluate.micro_batches;
        HeldBack mine;
        for (int64_t done = 0; done < micro_batches; done += schedules_.evaluation_size) {
            kernels().states()[++sequence_] = {
                .step = step_, .held_back_before = world_.rank * micro_batches + done};
            store().append(schedules_.evaluation, sequence_, step_);
            store().drain();
            mine.add(judge_->held_back(schedules_.evaluation_size));
        }
        kernels().keep_logits({});
        store().reset_report();
        mine.targets = kernels().evaluation_targets();
        HeldBack all = mine;
        if (ranks_) {
            all = {};
            for (const HeldBack& rank : gather(*ranks_, executor_, mine, "evaluation"))
                all.add(rank);
        }
        if (!all.finite()) throw diverged(all, plan_.layers, numerics_.compute);
        return all.mean();
    }

    // A tensor's values: this rank's, or its owners'.
    void read(int64_t layer, const model::Tensor& tensor, const Sink& sink, const Source& mine) {
        const zero::Run whole{tensor.offset, tensor.count};
        if (!ranks_) return mine(whole, sink);
        share_values(*ranks_, executor_, partition_, plan_.layers[static_cast<size_t>(layer)],
                     whole, mine, sink);
    }

    // The same of all arrays of its state.
    void read_arrays(int64_t layer, const model::Tensor& tensor, const ArraySink& sink) {
        const zero::Run whole{tensor.offset, tensor.count};
        const auto mine = [&](const zero::Run& run, const ArraySink& to) {
            state_->read_arrays(layer, run.first, run.count, to);
        };
        if (!ranks_) return mine(whole, sink);
        std::vector<Width> widths;
        for (const StateArray& array :
             state_arrays_of(plan_, plan_.layers[static_cast<size_t>(layer)], tensor))
            widths.push_back(array.width);
        share_arrays(*ranks_, executor_, partition_, plan_.layers[static_cast<size_t>(layer)],
                     whole, widths, mine, sink);
    }

    std::unique_ptr<SavedRun> open_saved(const Config& config, const std::string& checkpoint) {
        checkpoint_identity_ = checkpoint_identity_of(config, shape_, loader_.info());
        // Read now: the model's directory may be gone when it is wanted.
        if (!config.checkpoint.dir.empty())
            description_ = description_of(config, numerics_.compute);
        if (checkpoint.empty()) return nullptr;
        auto saved = std::make_unique<SavedRun>(checkpoint);
        saved->require(checkpoint_identity_, config.steps);
        return saved;
    }

    // All of it, before memory is taken: the ranks read a part each.
    void prove_saved() {
        saved_->require(plan_);
        saved_->prove(stack_.teams().all(), world_.rank, world_.ranks, stack_.start_up());
        if (world_.rank == 0 && saved_->manifest().numerics != numerics_record())
            log_info("the checkpoint was written under other numerics (" +
                     saved_->manifest().numerics +
                     "): from here on numbers may differ from those "
                     "of that run");
    }

    Unwritten unwritten(const Saving& saving) const {
        Unwritten made{.description = description_};
        note_run(run_state(), made.manifest);
        checkpoint::Manifest& manifest = made.manifest;
        const int64_t sequences =
            config_.batch.micro_batches * world_.ranks * config_.batch.micro_batch;
        manifest.steps = config_.steps;
        manifest.sequences = step_ * sequences;
        manifest.tokens = manifest.sequences * config_.batch.sequence;
        manifest.ferry = saving.program;
        manifest.model = config_.model.path;
        manifest.training = checkpoint_identity_;
        manifest.numerics = numerics_record();
        manifest.numerics_hash =
            numerics_hash(config_, shape_, machine_text(device_, config_), world_.ranks);
        manifest.ranks = world_.ranks;
        if (saving.held_back_loss) manifest.held_back = {step_, *saving.held_back_loss};
        return made;
    }

    // For what waits to be written; touched by the first checkpoint.
    void reserve_checkpoint_room() {
        const CheckpointConfig& saved = config_.checkpoint;
        if (saved.dir.empty() || (saved.every.steps == 0 && saved.every.seconds == 0)) return;
        const int64_t bytes = checkpoint_bytes(plan_, {});
        const int64_t left = memory_beside(plan_, config_, stack_.machine(), device_);
        const int64_t room = std::min(saved.memory_bytes.value_or(left), bytes);
        if (room > left)
            throw Error(Trouble::does_not_fit,
                        {.what = "host memory for checkpoints on their way does not fit",
                         .where = "checkpoint.memory",
                         .measured = format_bytes(room),
                         .limit = format_bytes(left) + " beside the plan",
                         .remedy = "lower it, raise budgets.host, or set it to auto"});
        try {
            checkpoint_room_ = stack_.pool().reserve("checkpoint", room, 0, stack_.teams());
        } catch (const Error&) {
            if (saved.memory_bytes) throw;
        }
        if (std::ssize(checkpoint_room_) < bytes)
            log_info(
                fmt::format("checkpoints of {}: host memory holds {} while it is written; "
                            "training waits until the rest is (checkpoint.memory)",
                            format_bytes(bytes), format_bytes(std::ssize(checkpoint_room_))));
    }

    std::unique_ptr<LoadedWeights> load(const Config& config, const Runtime& runtime) const {
        check_vocabulary(config, described_, loader_.info());
        if (saved_ || !runtime.imported.directory.empty()) return nullptr;
        return LoadedWeights::of(config.model, shape_, layers_);
    }

    std::unique_ptr<ImportedState> import(const Imported& imported) const {
        if (imported.directory.empty()) return nullptr;
        FERRY_CHECK(!ranks_, "state is imported by one rank");
        return std::make_unique<ImportedState>(imported.directory, shape_, layers_);
    }

    TierStack::Ground ground(const Config& config, bool resumes) {
        Topology machine =
            machine_of_rank(machine_for(config), device_.pci_address(), ranks_, executor_);
        if (resumes && !ranks_) take_recorded_kernels(config_, shape_, device_);
        if (saved_)
            take_kernels_of(saved_->manifest().numerics_hash, config_, shape_, device_,
                            world_.ranks);
        return {.config = config_,
                .executor = executor_,
                .device = device_,
                .machine = std::move(machine),
                .ranks = world_.ranks};
    }

    void make_plan(const Config& config, const Runtime& runtime) {
        if (!executor_.simulated())
            directories_ = std::make_unique<RankDirectories>(config, config_, world_);
        if (ranks_) require_same_start(config);
        planner::PlanRequest request = of_rank(request_of(config), world_);
        request.trains = !runtime.only_evaluates;
        planner_.emplace(request, device_, stack_.decoder(), partition_,
                         planning_measurements(request, measurements_, world_.local_ranks), ranks_,
                         executor_);
        stack_.plan(planner_->plan(ranks_, executor_));
        // Before memory is reserved and touched, which takes a minute where there is much.
        if (!executor_.simulated() && !runtime.resume) require_room(plan_, config_);
    }

    void require_same_start(const Config& config) const {
        if (config.checkpoint.durable_steps) throw several_ranks_not_durable(world_.ranks);
        require_same_run(
            *ranks_, executor_, device_.kind() == DeviceKind::cpu ? ops::blas_core() : "",
            numerics_text(config_, shape_, machine_text(device_, config_), world_.ranks),
            loader_.info(), saved_ ? saved_->text() : first_weights(loaded_.get(), shape_));
    }

    void open(const Config& config, const Runtime& runtime) {
        if (!executor_.simulated()) check_paths(config_);
        if (runtime.resume) require_recorded_formats(config_, shape_, device_);
        rows_.emplace(recording_, config_, world_.ranks, stack_.teams());
        judge_.emplace(config_, hyper_, schedule_, plan_, stack_.arena());
        if (ranks_) lane_ = std::make_unique<RankLane>(*ranks_, plan_, *judge_, step_);
        stack_.open(
            {.open_volume = runtime.open_volume,
             .run_id = numerics_hash(config_, shape_, machine_text(device_, config_), world_.ranks),
             .resume = runtime.resume,
             .has_ended =
                 [&](const aio::Volume& volume) {
                     return has_ended(volume, record_, swap::map_bytes(plan_.objects),
                                      config_.steps);
                 },
             .lays_out_later = true,  // the first contents go to nearly every slot
             .tracer = rows_->paths.tracer(),
             .loader = &loader_,
             .evaluation_micro_batches = config.evaluate.micro_batches,
             .workers = &rows_->workers,
             .recording = recording_,
             .rows = rows_->lanes.measured(),
             .collectives = lane_.get()});
        state_.emplace(plan_, store(), stack_.teams().all(),
                       StateIo::staging_of(plan_, stack_.arena()));
    }

    // As initialised, as read from the model's files, or as the resumed run left it.
    void first_contents(const Runtime& runtime) {
        const bool resumes = runtime.resume;
        const auto fill = [&](const model::Layer& layer, int64_t first, std::span<float> out) {
            if (loaded_) return loaded_->fill(layer, first, out);
            model::initialise(shape_, layer, config_.seed, first, out);
        };
        const auto touch = [this](std::span<std::byte> part) {
            stack_.pool().touch(part, stack_.teams());
        };
        const auto lock = [this] { stack_.lock_homes(); };
        StartUp& start_up = stack_.start_up();
        if (resumes) lock();
        const StateIo::FirstMoment moment = StateIo::first_moment_of(hyper_);
        if (resumes)
            resume_run(fill);
        else if (saved_)
            resume_saved(saved_->contents(plan_, moment), {touch, lock});
        else if (imported_)
            go_on_from({.step = runtime.imported.step,
                        .updates = runtime.imported.updates,
                        .loss_scale = loss_scale_.state(),
                        .frozen = state_->initialise(imported_->contents(moment), {touch, lock},
                                                     start_up)});
        else
            frozen_ = state_->initialise({fill, moment}, {touch, lock}, start_up);
        if (loaded_) loaded_->log_rate(start_up.seconds());
        loaded_.reset();
        const bool restored = resumes || saved_ || imported_;
        saved_.reset();
        imported_.reset();
        start_up.done(restored ? "restored state" : "first contents", state_->bytes());
    }

    void measure();
    void judge(const cost::Measurements& measured);

    void replay(StepReport& report) {
        StepState& state = kernels().states()[++sequence_];
        const double scale = report.loss_scale = loss_scale_.value();
        state = {.step = step_,
                 .gradient_scale = static_cast<float>(scale / static_cast<double>(report.targets))};
        report.speculative = plan_.speculative && judge_->speculates_now();
        if (report.speculative) state.speculative = judge_->scalars(updates_ + 1, 1 / scale);
        const swap::Schedule& schedule = schedules_.step(previous_, report.speculative);
        log_debug(fmt::format("step {} replays \"{}\": {} tasks, {} waits", step_, schedule.name,
                              schedule.tasks.size(), schedule.waits.size()));
        if (recording_)
            rows_->lanes.record(
                schedule, planned_[static_cast<size_t>(previous_)][report.speculative ? 1 : 0],
                executor_.now(), step_);
        store().append(schedule, sequence_, step_);
        if (plan_.durable) store().publish(committed_);
        store().run_to_outcome();
        const std::array<RankReport, 1> mine{ranks_ ? RankReport{} : judge_->report()};
        const Outcome outcome =
            judge_->judge(lane_ ? lane_->reports() : mine, report.targets, scale);
        report.loss = outcome.loss;
        report.gradient_norm = outcome.norm;
        report.clip_factor = outcome.clip_factor;
        if (!outcome.finite) return skip_or_stop(report, outcome);
        loss_scale_.good_step();
        skipped_in_a_row_ = 0;
        ++updates_;
        state.after_outcome = judge_->scalars(updates_, outcome.clip_factor / scale);
        report.committed = report.speculative && outcome.clip_factor == 1;
        previous_ = !report.speculative ? Previous::not_speculative
                    : report.committed  ? Previous::committed
                                        : Previous::rolled_back;
    }

    void skip_or_stop(StepReport& report, const Outcome& outcome) {
        previous_ = report.speculative ? Previous::dropped : Previous::none;
        report.skipped = true;
        // Scaling cannot cure a forward pass; a gradient that overflowed is what it is there for.
        if (loss_scale_.scales() && outcome.forward_was_finite) return loss_scale_.overflow(step_);
        if (!loss_scale_.scales() && config_.on_nonfinite == OnNonfinite::skip &&
            ++skipped_in_a_row_ < kSkipsMost)
            return;
        throw diverged(
            config_, outcome,
            {.where = "step " + std::to_string(step_) + ", " + place_of(outcome, plan_.layers),
             .last_good_step = step_ - std::max<int64_t>(skipped_in_a_row_, 1),
             .scales = loss_scale_.scales(),
             .skipped_in_a_row = skipped_in_a_row_});
    }

    void resume_run(const StateIo::Fill& fill) {
        if (!volume()) throw nothing_to_resume();
        go_on_from(resume(store(), record_, [&] { return state_->restore(fill); }));
        log_info(resumed_text(step_, volume()->noted_step()));
    }

    void resume_saved(const StateIo::Contents& contents, const StateIo::Watch& watch) {
        RunState found = run_of(saved_->manifest());
        found.frozen = state_->initialise(contents, watch, stack_.start_up());
        go_on_from(found);
        if (world_.rank == 0)
            log_info(fmt::format("resumed after step {} from {}", step_, saved_->path()));
    }

    void go_on_from(const RunState& found) {
        step_ = found.step;
        updates_ = found.updates;
        loss_scale_.resume(found.loss_scale);
        skipped_in_a_row_ = found.skipped_in_a_row;
        judge_->resume(found.unclipped_in_a_row);
        frozen_ = found.frozen;
        last_ = resumed_ = found.report;
    }

    RunState run_state() const {
        return {.step = step_,
                .updates = updates_,
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
        const Nanos start = executor_.now();
        if (previous_ != Previous::none) {
            kernels().states()[++sequence_] = {.step = step_};
            store().append(schedules_.drains[static_cast<size_t>(previous_)], sequence_, step_);
            previous_ = Previous::none;
        }
        if (plan_.durable && durable_step_ != step_) {
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

    swap::Store& store() const { return stack_.store(); }
    aio::Volume* volume() const { return stack_.volume(); }
    StepKernels& kernels() { return stack_.kernels(); }

    struct Rows {  // of a trace, in this order
        Rows(trace::Recording* recording, const Config& config, int ranks, const NodeTeams& teams)
            : lanes(recording, swap::lanes_of(ranks)),
              workers(recording, teams),
              paths(recording, config) {}
        TraceRows lanes;
        WorkerRows workers;
        PathRows paths;
    };

    const int exceptions_ = std::uncaught_exceptions();
    const std::shared_ptr<ComputeContext> context_;
    comm::Communicator* const ranks_;  // null: there is only this one
    const World world_;
    const zero::Partition partition_;
    const Config config_;  // of this rank
    Executor& executor_;
    Device& device_;
    trace::Recording* recording_;
    const cost::Measurements* measurements_;
    const optim::Hyper hyper_;
    const optim::LrSchedule schedule_;
    model::Description described_;
    const model::Shape& shape_ = described_.shape;
    model::Numerics numerics_;
    TokenLoader loader_;
    StepReport last_{};      // of the last step
    StepReport resumed_{};   // of the step resumed after
    std::string removed_{};  // a file of the durable state that was removed under the run
    std::vector<model::Layer> layers_;
    std::string checkpoint_identity_{}, description_{};  // description_: the model's config.json
    std::unique_ptr<SavedRun> saved_;                    // until the state is initialised
    std::unique_ptr<LoadedWeights> loaded_;              // as long
    std::unique_ptr<ImportedState> imported_;            // as long
    int64_t step_ = 0, last_good_ = 0, updates_ = 0, sequence_ = 0, durable_step_ = -1;
    // The stack needs these until it is closed: after an error its store still finishes tasks.
    std::unique_ptr<RankDirectories> directories_{};
    std::optional<Rows> rows_{};
    std::optional<OutcomeJudge> judge_{};
    std::unique_ptr<RankLane> lane_{};  // of several ranks
    Schedules schedules_{};
    TierStack stack_;
    const Plan& plan_ = stack_.plan();
    std::optional<RankPlanner> planner_{};
    std::optional<StateIo> state_{};
    RunRecord record_;
    std::span<const std::byte> committed_{};  // the record of the last step
    Timelines planned_{};                     // once the bound is known
    LossScale loss_scale_{numerics_.compute == DType::f16};
    int64_t skipped_in_a_row_ = 0;
    uint64_t frozen_ = 0;  // hash of the frozen weights
    Previous previous_ = Previous::none;
    RunReport totals_{};
    std::span<std::byte> checkpoint_room_{};
    std::unique_ptr<BackgroundSave> save_{};  // reads the plan, the room and the teams' threads
};

void Engine::Run::measure() {
    if (measurements_) return judge(cost::of_rank(*measurements_, world_.local_ranks));
    totals_ = so_far();  // drained, all buffers are free; what is moved from here is not the run's
    const trace::Recording::Pause pause(recording_);
    kernels().states()[StepStates::kMeasured] = {.step = 1, .gradient_scale = 1};
    cost::Measurements measured = take_measurements(
        schedules_.steady(), stack_.bench(), stack_.teams(), stack_.machine(),
        judge_->scalars(1, 1.0)[0], stack_.arena(), shape_.vocab, updated_bytes(plan_));
    time_storage(config_, plan_, store(), executor_, measured);
    if (ranks_) time_gathers(stack_.bench(), *ranks_, measured);
    if (totals_.bound_seconds == 0) log_unlike_assumed(config_, measured, world_.local_ranks);
    judge(measured);
    store().reset_report();
}

void Engine::Run::judge(const cost::Measurements& measured) {
    planned_ = predict_all(schedules_, plan_, measured);
    train::judge(totals_, planned_, config_, plan_, stack_.decoder(), schedules_, measured);
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

bool Engine::any(bool mine) { return run_->any(mine); }
void Engine::abandon(const char* why) noexcept { run_->abandon(why); }
StepReport Engine::step() { return run_->step(); }
int64_t Engine::last_step() const { return run_->last_step(); }
const StepReport* Engine::resumed_step() const { return run_->resumed_step(); }
Evaluation Engine::evaluate(std::span<float> logits) { return run_->evaluate(logits); }
std::optional<Error> Engine::save(const Saving& saving) {
    run_->begin_save(saving);
    return run_->end_save();
}
void Engine::begin_save(const Saving& saving) { run_->begin_save(saving); }
bool Engine::save_ended() const { return run_->save_ended(); }
std::optional<Error> Engine::end_save() { return run_->end_save(); }
uint64_t Engine::state_hash() { return run_->state_hash(); }
void Engine::read_tensor(int64_t layer, const model::Tensor& tensor, const Sink& sink) {
    run_->read_tensor(layer, tensor, sink);
}
void Engine::read_gradient(int64_t layer, const model::Tensor& tensor, const Sink& sink) {
    run_->read_gradient(layer, tensor, sink);
}
void Engine::measure_bound() { run_->measure_bound(); }
const Plan& Engine::plan() const { return run_->plan(); }
const std::vector<model::Layer>& Engine::layers() const { return run_->layers(); }
std::string Engine::numerics_record() const { return run_->numerics_record(); }
RunReport Engine::report() { return run_->report(); }

}  // namespace ferry::train
