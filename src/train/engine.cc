#include "ferry/train.h"

#include <spdlog/fmt/fmt.h>

#include <algorithm>
#include <cmath>
#include <exception>

#include "arenas.h"
#include "base/checksum.h"
#include "clipped_share.h"
#include "cost/traffic.h"
#include "device_needs.h"
#include "durable.h"
#include "ferry/optim.h"
#include "loaded_weights.h"
#include "loader_of.h"
#include "loss_scale.h"
#include "measure.h"
#include "memory_left.h"
#include "model_of.h"
#include "numerics_record.h"
#include "ops/blas_kernels.h"
#include "outcome.h"
#include "path_rows.h"
#include "plan_figures.h"
#include "rank_lane.h"
#include "rank_planner.h"
#include "ranks.h"
#include "resumed_kernels.h"
#include "schedules.h"
#include "shared_values.h"
#include "state_io.h"
#include "step_kernels.h"
#include "storage_room.h"
#include "threads.h"
#include "trace_rows.h"
#include "train/from_config.h"
#include "volume_options.h"

namespace ferry::train {

using planner::Plan;

namespace {

class Run final : public Engine {
public:
    Run(const Config& config, const Runtime& runtime, std::shared_ptr<ComputeContext> context)
        : context_(std::move(context)),
          ranks_(context_->ranks.get()),
          world_(context_->world()),
          partition_(zero::partition_of(config.zero.stage, world_.rank, world_.ranks)),
          config_(config_of_rank(config, world_)),
          executor_(*runtime.executor),
          recording_(runtime.recording),
          figures_(runtime.figures),
          hyper_(hyper_of(config)),
          schedule_(schedule_of(config)),
          topology_(machine_of_rank(machine_for(config), context_->device->pci_address(), ranks_,
                                    executor_)),
          teams_(make_teams(config_, topology_, executor_, world_.ranks)),
          described_(model_of(config)),
          numerics_(numerics_of(config, shape_)),
          loader_(loader_options(config, shape_, !runtime.only_evaluates, partition_)),
          layers_(model::layers_of(shape_, config.freeze, config.optimizer.decay_norms_and_biases,
                                   world_.ranks)),
          loaded_(load(config)),
          device_(*context_->device),
          ops_(operations(runtime.resume)),
          decoder_(shape_, numerics_, layers_, *ops_),
          directories_(executor_.simulated()
                           ? nullptr
                           : std::make_unique<RankDirectories>(config, config_, world_)),
          planner_(make_planner(config, !runtime.only_evaluates)),
          plan_(within_limits(planner_.plan(ranks_, executor_), runtime.resume)),
          pool_(topology_, config_.budgets.host_bytes),
          arena_(reserve_arenas(plan_, device_, *teams_, pool_, start_up_)),
          trace_rows_(recording_, swap::lanes_of(world_.ranks)),
          worker_rows_(recording_, *teams_),
          path_rows_(runtime.recording, config_),
          volume_(open_volume(runtime)),
          judge_(config_, hyper_, schedule_, plan_, arena_),
          kernels_(plan_, *teams_,
                   {&decoder_, ops_.get(), &loader_, config.evaluate.micro_batches, &device_,
                    &worker_rows_}),
          lane_(ranks_ ? std::make_unique<RankLane>(*ranks_, plan_, judge_, step_) : nullptr),
          store_(swap::Store::make(store_options(), executor_, device_, volume_.get(), kernels_)),
          state_(plan_, *store_, teams_->all(), StateIo::staging_of(plan_, arena_)),
          record_(identity_of(config, numerics_record(), loader_.info()), config.steps) {
        if (world_.rank == 0) warn_of_text(config_, described_);
        pool_.seal();
        log_machine(config_, topology_, device_, executor_);
        if (!executor_.simulated()) log_planned_by(figures_, config_);
        schedules_.record(plan_, config_.evaluate.micro_batches);
        if (ranks_) require_same_exchanges(*ranks_, executor_, schedules_.all());
        start_up_.next();
        if (device_.kind() == DeviceKind::cuda) warm_up_device();
        start_up_.done("kernels loaded, GPU memory", plan_.device_bytes);
        fill_state(runtime.resume);
        note_committed();
        drain();
        totals_ = {};
        store_->reset_report();
    }

    ~Run() override {
        // Of the caller's, who has not said which: the others would wait for this rank.
        if (std::uncaught_exceptions() > exceptions_) context_->abandon("raised between its steps");
    }

    StepReport step() override {
        return guarded([this] { return next_step(); });
    }

    int64_t last_step() const override { return step_; }

    Evaluation evaluate(std::span<float> logits) override {
        return guarded([&] { return held_back(logits); });
    }

    uint64_t state_hash() override {
        return guarded([this] {
            drain();
            const uint64_t mine = state_.hash();
            if (!ranks_) return mine;
            const std::vector<uint64_t> all = gather(*ranks_, executor_, mine, "state hash");
            return checksum(std::as_bytes(std::span(all)));
        });
    }

    void read_tensor(int64_t layer, const model::Tensor& tensor, const Sink& sink) override {
        guarded([&] {
            drain();
            read(layer, tensor, sink, [&](const zero::Run& run, const Sink& to) {
                state_.read(layer, run.first, run.count, to);
            });
        });
    }

    void read_gradient(int64_t layer, const model::Tensor& tensor, const Sink& sink) override {
        guarded([&] {
            store_->drain();
            read(layer, tensor, sink, [&](const zero::Run& run, const Sink& to) {
                state_.read_gradient(layer, run.first, run.count, to);
            });
        });
    }

    bool any(bool mine) override {
        if (!ranks_) return mine;
        return guarded([&] {
            const auto all = gather(*ranks_, executor_, static_cast<uint8_t>(mine), "wishes");
            return std::ranges::any_of(all, [](uint8_t wish) { return wish != 0; });
        });
    }

    void measure_bound() override {
        guarded([this] { measure(); });
    }
    void abandon(const char* why) noexcept override { context_->abandon(why); }

    const Plan& plan() const override { return plan_; }
    const std::vector<model::Layer>& layers() const override { return plan_.layers; }
    std::string numerics_record() const override {
        const std::string machine = machine_text(device_, config_);
        return fmt::format("{:016x} ({})", numerics_hash(config_, shape_, machine, world_.ranks),
                           numerics_text(config_, shape_, machine, world_.ranks));
    }
    RunReport report() override {
        return guarded([this] { return so_far(); });
    }

private:
    // What ends this rank, the others hear at once; what storage lost, whoever finds its files.
    template <class Work>
    std::invoke_result_t<Work> guarded(const Work& work) {
        try {
            return work();
        } catch (const std::exception& error) {
            context_->abandon(error.what());
            if (volume_ && is_of_storage(error)) volume_->note_lost();
            throw_again_at(
                {step_, last_good_, volume_ != nullptr, plan_.durable, store_->what_was_wrong()});
        }
    }

    RunReport so_far() {
        drain();
        RunReport report = totals_;
        report.model_flops = cost::model_flops(plan_.layers, shape_, numerics_.sequence,
                                               plan_.micro_batches * numerics_.tokens());
        add_links(report.links, *store_, world_.ranks);
        report.reserved = reserved_by(device_, pool_, volume_.get());
        if (volume_) report.paths = volume_->counters();
        look_for_files();
        report.removed = removed_;
        return report;
    }

    StepReport next_step() {
        const Nanos start = executor_.now();
        StepReport report{.step = ++step_,
                          .tokens = plan_.micro_batches * world_.ranks * numerics_.tokens()};
        report.targets = loader_.count_targets(step_);
        report.lr = judge_.learning_rate(updates_ + 1);
        if (report.targets == 0) {
            log_warn("step " + std::to_string(step_) + " has no real target and is skipped");
            report.skipped = true;
        } else {
            replay(report);
        }
        note_committed();
        report.seconds = static_cast<double>(executor_.now() - start) * 1e-9;
        note(report);
        return report;
    }

    // Each rank goes through as many micro-batches, the last ones perhaps without a target.
    Evaluation held_back(std::span<float> logits) {
        totals_ = so_far();  // evaluation moves weights too; the run's figures are training's alone
        store_->reset_report();
        kernels_.evaluation_targets() = 0;
        kernels_.keep_logits(logits);
        const int64_t micro_batches = config_.evaluate.micro_batches;
        HeldBack mine;
        for (int64_t done = 0; done < micro_batches; done += schedules_.evaluation_size) {
            kernels_.states()[++sequence_] = {
                .step = step_, .held_back_before = world_.rank * micro_batches + done};
            store_->append(schedules_.evaluation, sequence_, step_);
            store_->drain();
            mine.add(judge_.held_back(schedules_.evaluation_size));
        }
        kernels_.keep_logits({});
        store_->reset_report();
        mine.targets = kernels_.evaluation_targets();
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

    // Before memory is reserved and touched, which takes a minute where there is much.
    Plan within_limits(Plan plan, bool resumes) const {
        plan = within_memory(std::move(plan), config_, topology_, device_);
        return executor_.simulated() || resumes ? plan : with_room(std::move(plan), config_);
    }

    std::unique_ptr<LoadedWeights> load(const Config& config) const {
        check_vocabulary(config, described_, loader_.info());
        return LoadedWeights::of(config.model, shape_, layers_);
    }

    std::unique_ptr<ops::Ops> operations(bool resumes) {
        if (resumes && !ranks_) take_recorded_kernels(config_, shape_, device_);
        return ops_on(device_, config_, teams_->all());
    }

    RankPlanner make_planner(const Config& config, bool trains) {
        if (ranks_) {
            if (config.checkpoint.durable_steps) throw several_ranks_not_durable(world_.ranks);
            require_same_run(
                *ranks_, executor_, device_.kind() == DeviceKind::cpu ? ops::blas_core() : "",
                numerics_text(config_, shape_, machine_text(device_, config_), world_.ranks),
                loader_.info(), first_weights(loaded_.get(), shape_));
        }
        planner::PlanRequest request = of_rank(request_of(config), world_);
        request.trains = trains;
        return RankPlanner(request, device_, decoder_, partition_,
                           planning_figures(request, figures_, world_.local_ranks), ranks_,
                           executor_);
    }

    // As initialised, as read from the model's files, or as the resumed run left it.
    void fill_state(bool resumes) {
        // The driver does one thing at a time: kernels first, and what is copied to the GPU.
        std::future<void> homes_locked;
        const auto lock = [&] { homes_locked = lock_homes(plan_, device_, pool_, arena_); };
        const auto fill = [&](const model::Layer& layer, int64_t first, std::span<float> out) {
            if (loaded_) return loaded_->fill(layer, first, out);
            model::initialise(shape_, layer, config_.seed, first, out);
        };
        const auto touch = [this](std::span<std::byte> part) { pool_.touch(part, *teams_); };
        if (resumes) lock();
        if (resumes)
            resume_run(fill);
        else
            frozen_ =
                state_.initialise(fill, optim::initial_moment(hyper_), {touch, lock}, start_up_);
        if (loaded_) loaded_->log_rate(start_up_.seconds());
        loaded_.reset();
        start_up_.done(resumes ? "restored state" : "first contents", state_.bytes());
        if (volume_) volume_->finish_layout();
        start_up_.done("layout of what is left on NVMe", plan_.nvme_bytes);
        homes_locked.get();
        start_up_.done("host memory, touched and page-locked behind it", plan_.host_bytes);
        // With the GPU's tables of those pages.
        if (device_.kind() == DeviceKind::cuda) check_device_memory(device_, plan_, config_);
    }

    std::unique_ptr<aio::Volume> open_volume(const Runtime& runtime) {
        if (!executor_.simulated()) check_paths(config_);
        if (plan_.slot_classes.empty()) return nullptr;
        const uint64_t run_id =
            numerics_hash(config_, shape_, machine_text(device_, config_), world_.ranks);
        aio::VolumeOptions options = volume_options(config_, plan_, topology_, arena_, run_id);
        options.tracer = path_rows_.tracer();
        if (runtime.resume) options.leftover = aio::Leftover::resume;
        options.lays_out_later = true;  // the first contents go to nearly every slot
        return runtime.open_volume(std::move(options), executor_);
    }

    swap::StoreOptions store_options() const {
        return {.objects = plan_.objects,
                .host_slots = plan_.host_slots,
                .resources = plan_.resources,
                .verify = plan_.verify,
                .host_arena = arena_,
                .recording = recording_,
                .rows = trace_rows_.measured(),
                .kernel_name = [](uint8_t op) { return cost::name_of(static_cast<cost::Op>(op)); },
                .collectives = lane_.get(),
                .parallel = parallel_on(*teams_)};
    }

    void measure();
    void judge(const cost::Measurements& measured);
    Bench bench() { return {plan_, device_, executor_, kernels_, *store_, ops_.get(), &decoder_}; }

    // After it everything that takes device memory has taken it, and the cap can be judged.
    void warm_up_device() {
        StepStates& states = kernels_.states();
        states[StepStates::kMeasured] = {.step = 1, .gradient_scale = 1};
        states.before(StepStates::kMeasured).after_outcome = judge_.scalars(1, 1.0);  // of zeros
        warm_up(schedules_.steady(), bench());
        store_->drain();  // throws what went wrong
        check_device_memory(device_, plan_, config_);
    }

    void replay(StepReport& report) {
        StepState& state = kernels_.states()[++sequence_];
        const double scale = report.loss_scale = loss_scale_.value();
        state = {.step = step_,
                 .gradient_scale = static_cast<float>(scale / static_cast<double>(report.targets))};
        report.speculative = plan_.speculative && judge_.speculates_now();
        if (report.speculative) state.speculative = judge_.scalars(updates_ + 1, 1 / scale);
        const swap::Schedule& schedule = schedules_.step(previous_, report.speculative);
        log_debug(fmt::format("step {} replays \"{}\": {} tasks, {} waits", step_, schedule.name,
                              schedule.tasks.size(), schedule.waits.size()));
        if (recording_)
            trace_rows_.record(schedule,
                               planned_[static_cast<size_t>(previous_)][report.speculative ? 1 : 0],
                               executor_.now(), step_);
        store_->append(schedule, sequence_, step_);
        if (plan_.durable) store_->publish(committed_);
        store_->run_to_outcome();
        const std::array<RankReport, 1> mine{ranks_ ? RankReport{} : judge_.report()};
        const Outcome outcome =
            judge_.judge(lane_ ? lane_->reports() : mine, report.targets, scale);
        report.loss = outcome.loss;
        report.gradient_norm = outcome.norm;
        report.clip_factor = outcome.clip_factor;
        if (!outcome.finite) return skip_or_stop(report, outcome);
        loss_scale_.good_step();
        skipped_in_a_row_ = 0;
        ++updates_;
        state.after_outcome = judge_.scalars(updates_, outcome.clip_factor / scale);
        report.committed = report.speculative && outcome.clip_factor == 1;
        previous_ = !report.speculative ? Previous::rest
                    : report.committed  ? Previous::committed
                                        : Previous::redo;
    }

    void skip_or_stop(StepReport& report, const Outcome& outcome) {
        previous_ = report.speculative ? Previous::drop : Previous::none;
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
        if (!volume_) throw nothing_to_resume();
        const RunState found = resume(*store_, record_, [&] { return state_.restore(fill); });
        step_ = found.step;
        updates_ = found.updates;
        loss_scale_.resume(found.loss_scale);
        skipped_in_a_row_ = found.skipped_in_a_row;
        judge_.resume(found.unclipped_in_a_row);
        frozen_ = found.frozen;
        log_info(resumed_text(step_, volume_->noted_step()));
    }

    // How far the run has come: for whoever finds its files, and to go on from there.
    void note_committed() {
        last_good_ = step_;
        if (volume_) volume_->note_step(step_);
        if (!plan_.durable) return;
        look_for_files();
        committed_ = record_.write({.step = step_,
                                    .updates = updates_,
                                    .loss_scale = loss_scale_.state(),
                                    .skipped_in_a_row = skipped_in_a_row_,
                                    .unclipped_in_a_row = judge_.unclipped_in_a_row(),
                                    .frozen = frozen_},
                                   plan_.record_bytes - swap::map_bytes(plan_.objects));
    }

    // The run goes on without them, and nothing of it outlives the process.
    void look_for_files() {
        if (!plan_.durable || !removed_.empty()) return;
        removed_ = volume_->missing();
        if (!removed_.empty()) log_warn(nothing_durable(removed_, last_good_).what());
    }

    // Finishes the last step, to the last byte that is to be durable; its time is the steps'.
    void drain() {
        const Nanos start = executor_.now();
        if (previous_ != Previous::none) {
            kernels_.states()[++sequence_] = {.step = step_};
            store_->append(schedules_.drains[static_cast<size_t>(previous_)], sequence_, step_);
            previous_ = Previous::none;
        }
        if (plan_.durable && durable_step_ != step_) {
            store_->publish(committed_);
            durable_step_ = step_;
        }
        store_->drain();
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

    const int exceptions_ = std::uncaught_exceptions();
    const std::shared_ptr<ComputeContext> context_;
    comm::Communicator* const ranks_;  // null: there is only this one
    const World world_;
    const zero::Partition partition_;
    const Config config_;  // of this rank
    Executor& executor_;
    trace::Recording* recording_;
    const cost::Measurements* figures_;
    const optim::Hyper hyper_;
    const optim::LrSchedule schedule_;
    Topology topology_;
    std::unique_ptr<NodeTeams> teams_;
    model::Description described_;
    const model::Shape& shape_ = described_.shape;
    model::Numerics numerics_;
    TokenLoader loader_;
    std::string removed_{};  // a file of the durable state that was removed under the run
    std::vector<model::Layer> layers_;
    std::unique_ptr<LoadedWeights> loaded_;  // until the state is initialised
    Device& device_;
    std::unique_ptr<ops::Ops> ops_;
    model::Decoder decoder_;
    const std::unique_ptr<RankDirectories> directories_;
    RankPlanner planner_;
    Plan plan_;
    StartUp start_up_{executor_};
    pinned_mem::Pool pool_;
    std::span<std::byte> arena_;
    TraceRows trace_rows_;
    WorkerRows worker_rows_;
    PathRows path_rows_;
    std::unique_ptr<aio::Volume> volume_;
    OutcomeJudge judge_;
    StepKernels kernels_;
    std::unique_ptr<RankLane> lane_;  // of several ranks
    Schedules schedules_{};  // outlive the store, which after an error still finishes their tasks
    std::unique_ptr<swap::Store> store_;
    StateIo state_;
    RunRecord record_;
    std::span<const std::byte> committed_{};  // the record of the last step
    Timelines planned_{};                     // once the bound is known
    LossScale loss_scale_{numerics_.compute == DType::f16};
    int64_t skipped_in_a_row_ = 0;
    int64_t step_ = 0, last_good_ = 0, updates_ = 0, sequence_ = 0, durable_step_ = -1;
    uint64_t frozen_ = 0;  // hash of the frozen weights
    Previous previous_ = Previous::none;
    RunReport totals_{};
};

void Run::measure() {
    if (figures_) return judge(cost::of_rank(*figures_, world_.local_ranks));
    totals_ = so_far();  // drained, all buffers are free; what is moved from here is not the run's
    const trace::Recording::Pause pause(recording_);
    kernels_.states()[StepStates::kMeasured] = {.step = 1, .gradient_scale = 1};
    cost::Measurements measured =
        measure_figures(schedules_.steady(), bench(), *teams_, topology_, judge_.scalars(1, 1.0)[0],
                        arena_, shape_.vocab, updated_bytes(plan_));
    time_storage(config_, plan_, *store_, executor_, measured);
    if (ranks_) time_gathers(bench(), *ranks_, measured);
    if (totals_.bound_seconds == 0) log_unlike_assumed(config_, measured);
    judge(measured);
    store_->reset_report();
}

void Run::judge(const cost::Measurements& measured) {
    planned_ = predict_all(schedules_, plan_, measured);
    train::judge(totals_, planned_, config_, plan_, shape_, schedules_, measured);
    if (world_.rank == 0) log_clipped_otherwise(totals_, plan_, planner_, measured);
}

}  // namespace

std::unique_ptr<Engine> Engine::make(const Config& config, Runtime runtime) {
    const auto context = std::make_shared<ComputeContext>();
    try {
        context->open(config, runtime);
        return std::make_unique<Run>(config, runtime, context);
    } catch (const std::exception& error) {
        context->abandon(error.what());
        throw;
    }
}

}  // namespace ferry::train
