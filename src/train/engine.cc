#include "ferry/train.h"

#include <spdlog/fmt/fmt.h>

#include <cmath>
#include <limits>

#include "bound.h"
#include "ferry/optim.h"
#include "ferry/pinned_mem.h"
#include "loaded_weights.h"
#include "loss_scale.h"
#include "measure.h"
#include "path_rows.h"
#include "predict.h"
#include "settle.h"
#include "setup.h"
#include "state_io.h"
#include "step.h"
#include "step_kernels.h"

namespace ferry::train {

using planner::Class;
using planner::Plan;

namespace {

std::unique_ptr<LoadedWeights> open_weights(const Config& config, const model::Shape& shape,
                                            const std::vector<model::Layer>& layers) {
    if (config.model.path.empty() || !config.model.load) return nullptr;
    return std::make_unique<LoadedWeights>(config.model.path, shape, layers);
}

// NaN without the sign that printf gives it.
std::string number_text(double value) { return std::isnan(value) ? "nan" : std::to_string(value); }

class Run final : public Engine {
public:
    Run(const Config& config, const Runtime& runtime)
        : config_(config),
          executor_(*runtime.executor),
          recording_(runtime.recording),
          figures_(runtime.figures),
          hyper_(hyper_of(config)),
          schedule_(schedule_of(config)),
          topology_(discover_topology()),
          teams_(make_teams(config, topology_, executor_)),
          numerics_(numerics_of(config)),
          shape_(model_of(config).shape),
          loader_(loader_options(config, shape_)),
          layers_(model::layers_of(shape_, config.freeze, config.optimizer.decay_norms_and_biases)),
          loaded_(open_weights(config, shape_, layers_)),
          device_(Device::open(device_from(config.device), executor_)),
          ops_(ops_on(*device_, config, teams_->all())),
          decoder_(shape_, numerics_, layers_, *ops_),
          plan_(within_memory(
              planner::make_plan(within(config, *device_), decoder_.layers(), numerics_,
                                 needs_of(*device_, decoder_), format_of(config)),
              config, topology_, *device_)),
          pool_(topology_, config.budgets.host_bytes),
          arena_(reserve()),
          path_rows_(runtime.recording, config.budgets.nvme),
          volume_(open_volume(runtime)),
          kernels_(plan_, *teams_, {&decoder_, ops_.get(), &loader_}),
          store_(swap::Store::make(store_options(), executor_, *device_, volume_.get(), kernels_)),
          state_(plan_, *store_, teams_->all(), staging(Class::stage),
                 staging(Class::weight_piece)),
          settler_(config, hyper_, schedule_, plan_, floats_at(plan_.leaves_offset)) {
        pool_.seal();
        record_schedules();
        if (device_->kind() == DeviceKind::cuda) warm_up_device();
        state_.initialise(
            [&](const model::Layer& layer, int64_t first, std::span<float> out) {
                if (loaded_) return loaded_->fill(layer, first, out);
                model::initialise(shape_, layer, config.seed, first, out);
            },
            optim::initial_moment(hyper_));
        loaded_.reset();
        store_->reset_report();
    }

    StepReport step() override {
        const Nanos start = executor_.now();
        StepReport report{.step = ++step_, .tokens = plan_.micro_batches * numerics_.tokens()};
        report.targets = loader_.count_targets(step_);
        report.lr = settler_.learning_rate(updates_ + 1);
        if (report.targets == 0) {
            log_warn("step " + std::to_string(step_) + " has no real target and is skipped");
            report.skipped = true;
        } else {
            replay(report);
        }
        report.seconds = static_cast<double>(executor_.now() - start) * 1e-9;
        note(report);
        return report;
    }

    Evaluation evaluate() override {
        totals_ = report();  // evaluation moves weights too; the run's figures are training's alone
        store_->reset_report();
        kernels_.evaluation_targets() = 0;
        double loss_sum = 0;
        for (int64_t done = 0; done < config_.evaluate.micro_batches; done += evaluation_size_) {
            store_->append(evaluation_, done);
            store_->drain();
            loss_sum = add_losses(loss_sum, evaluation_size_);
        }
        store_->reset_report();
        const int64_t targets = kernels_.evaluation_targets();
        return {.loss = targets > 0 ? loss_sum / static_cast<double>(targets)
                                    : std::numeric_limits<double>::quiet_NaN(),
                .targets = targets};
    }

    uint64_t state_hash() override {
        drain();
        return state_.hash();
    }

    void read_tensor(int64_t layer, const model::Tensor& tensor, const Sink& sink) override {
        drain();
        state_.read(layer, tensor.offset, tensor.count, sink);
    }

    void read_gradient(int64_t layer, const model::Tensor& tensor, const Sink& sink) override {
        store_->drain();
        state_.read_gradient(layer, tensor.offset, tensor.count, sink);
    }

    void measure_bound() override;

    const Plan& plan() const override { return plan_; }
    const std::vector<model::Layer>& layers() const override { return plan_.layers; }
    std::string numerics_record() const override {
        const std::string machine = machine_text(*device_, config_);
        return fmt::format("{:016x} ({})", numerics_hash(config_, shape_, machine),
                           numerics_text(config_, shape_, machine));
    }
    RunReport report() override;

private:
    // The arenas of the plan; the host's is returned, page-locked where the device needs it.
    std::span<std::byte> reserve() {
        device_->reserve(plan_.device_bytes);
        const std::span<std::byte> arena =
            pool_.reserve("state and staging", plan_.host_bytes, *teams_);
        pool_.lock_for(*device_, teams_->all());
        return arena;
    }

    std::unique_ptr<aio::Volume> open_volume(const Runtime& runtime) {
        if (!executor_.simulated()) check_paths(config_);
        if (plan_.slot_classes.empty()) return nullptr;
        const uint64_t run_id = numerics_hash(config_, shape_, machine_text(*device_, config_));
        aio::VolumeOptions options = volume_options(config_, plan_, arena_, run_id);
        options.tracer = path_rows_.tracer();
        return runtime.open_volume(std::move(options), executor_);
    }

    swap::StoreOptions store_options() {
        swap::StoreOptions options{.objects = plan_.objects,
                                   .host_slots = plan_.host_slots,
                                   .resources = plan_.resources,
                                   .verify = plan_.verify,
                                   .host_arena = arena_,
                                   .recording = recording_,
                                   .kernel_name = [](uint8_t op) {
                                       return planner::name_of(static_cast<planner::Op>(op));
                                   }};
        for (size_t lane = 0; recording_ && lane < swap::kLanes; ++lane) {
            const std::string name(swap::name_of(static_cast<swap::Lane>(lane)));
            options.rows[lane] = recording_->add_row("measured", name);
            planned_rows_[lane] = recording_->add_row("planned", name);
        }
        return options;
    }

    // Beside what this step will do, what it should.
    void record_plan(const swap::Schedule& schedule, const swap::Timeline& planned) {
        const Nanos start = executor_.now();
        for (size_t t = 0; t < planned.tasks.size(); ++t) {
            const swap::Task& task = schedule.tasks[t];
            const auto at = [&](double seconds) {
                return start + static_cast<Nanos>(seconds * 1e9);
            };
            recording_->add({.row = planned_rows_[static_cast<size_t>(task.lane)],
                             .name = task.verb == swap::Verb::kernel
                                         ? planner::name_of(static_cast<planner::Op>(task.op))
                                         : swap::name_of(task.verb),
                             .begin_ns = at(planned.tasks[t].begin_s),
                             .end_ns = at(planned.tasks[t].end_s),
                             .bytes = task.bytes,
                             .step = sequence_,
                             .layer = task.layer,
                             .item = task.item});
        }
    }

    std::span<std::byte> staging(Class c) const {
        const planner::Buffers& b = plan_.buffers[static_cast<size_t>(c)];
        return arena_.subspan(static_cast<size_t>(b.offset), static_cast<size_t>(b.bytes));
    }
    const float* floats_at(int64_t offset) const {
        return reinterpret_cast<const float*>(arena_.data() + offset);
    }

    // The report of the schedule that has run, once its verdict is due.
    double add_losses(double sum, int64_t micro_batches) const {
        const auto* losses = reinterpret_cast<const double*>(arena_.data() + plan_.report_offset);
        for (int64_t i = 0; i < micro_batches; ++i) sum += losses[i];
        return sum;
    }
    bool output_was_finite(size_t layer) const {
        const auto* nonfinite = reinterpret_cast<const uint32_t*>(
            arena_.data() + plan_.report_offset + plan_.nonfinite_offset());
        return nonfinite[layer] == 0;
    }

    void record_schedules() {
        for (size_t p = 0; p < kPrevious; ++p) {
            const auto previous = static_cast<Previous>(p);
            steps_[p][0] = record_step(plan_, previous, false);
            if (plan_.betting) steps_[p][1] = record_step(plan_, previous, true);
            drains_[p] = record_drain(plan_, previous);
        }
        // Evaluation's micro-batches go through the layers together too: the most that fit a group.
        evaluation_size_ =
            std::min(plan_.group_size(), std::max<int64_t>(config_.evaluate.micro_batches, 1));
        while (config_.evaluate.micro_batches % evaluation_size_ != 0) --evaluation_size_;
        evaluation_ = record_evaluation(plan_, evaluation_size_);
    }

    void judge(const Figures& figures);
    Bench bench() { return {plan_, *device_, executor_, kernels_, *store_}; }

    // After it everything that takes device memory has taken it, and the cap can be judged.
    void warm_up_device() {
        kernels_.states()[0] = {.step = 1, .gradient_scale = 1};
        warm_up(steps_[static_cast<size_t>(Previous::rest)][0], bench());
        store_->drain();  // throws what went wrong
        const int64_t overhead = device_->overhead_bytes();
        const int64_t held = overhead + static_cast<int64_t>(device_->memory().size());
        log_info("the GPU's memory: " + format_bytes(held) + " held by this process, " +
                 format_bytes(overhead) + " of it context, kernels and libraries (" +
                 format_bytes(plan_.device_overhead_bytes) + " planned)");
        if (held <= config_.budgets.device_bytes) return;
        throw Error(Trouble::does_not_fit,
                    {.what = "the GPU's libraries took more memory than planned for",
                     .where = "budgets.device",
                     .measured = format_bytes(held) + " held by this process",
                     .limit = format_bytes(config_.budgets.device_bytes) + ", " +
                              format_bytes(held - config_.budgets.device_bytes) + " missing",
                     .remedy = "set budgets.device to " + std::to_string(held) + " or more"});
    }

    void replay(StepReport& report) {
        StepState& state = kernels_.states()[++sequence_];
        const double scale = report.loss_scale = loss_scale_.value();
        state = {.step = step_,
                 .gradient_scale = static_cast<float>(scale / static_cast<double>(report.targets))};
        report.bet = plan_.betting && settler_.bets_now();
        if (report.bet) state.bet = settler_.scalars(updates_ + 1, 1 / scale);
        const swap::Schedule& schedule = steps_[static_cast<size_t>(previous_)][report.bet ? 1 : 0];
        log_debug("step " + std::to_string(step_) + " replays \"" + schedule.name +
                  "\": " + std::to_string(schedule.tasks.size()) + " tasks, " +
                  std::to_string(schedule.waits.size()) + " waits");
        if (recording_)
            record_plan(schedule, planned_[static_cast<size_t>(previous_)][report.bet ? 1 : 0]);
        store_->append(schedule, sequence_);
        store_->run_to_verdict();
        report.loss = add_losses(0, plan_.micro_batches) / static_cast<double>(report.targets);
        const Verdict verdict = settler_.settle(report.loss, scale);
        report.gradient_norm = verdict.norm;
        report.clip_factor = verdict.clip_factor;
        if (!verdict.finite) return skip_or_stop(report, verdict);
        loss_scale_.good_step();
        skipped_in_a_row_ = 0;
        ++updates_;
        state.settled = settler_.scalars(updates_, verdict.clip_factor / scale);
        report.won = report.bet && verdict.clip_factor == 1;
        previous_ = !report.bet ? Previous::rest : report.won ? Previous::won : Previous::redo;
    }

    void skip_or_stop(StepReport& report, const Verdict& verdict) {
        previous_ = report.bet ? Previous::drop : Previous::none;
        report.skipped = true;
        int64_t layer = verdict.layer;
        bool forward_was_finite = std::isfinite(report.loss);
        for (size_t l = plan_.layers.size(); l-- > 0;) {
            if (output_was_finite(l)) continue;
            layer = static_cast<int64_t>(l);
            forward_was_finite = false;
        }
        // Scaling cannot cure a forward pass; a gradient that overflowed is what it is there for.
        if (loss_scale_.scales() && forward_was_finite) return loss_scale_.overflow(step_);
        if (!loss_scale_.scales() && config_.on_nonfinite == "skip" &&
            ++skipped_in_a_row_ < kSkipsMost)
            return;
        throw Error(
            Trouble::diverged,
            {.what = "loss or gradient is not finite",
             .where = "step " + std::to_string(step_) + ", " + layer_name(plan_.layers, layer),
             .measured = "loss " + number_text(report.loss) + ", gradient norm " +
                         number_text(verdict.norm),
             .limit = "the last good step is " +
                      std::to_string(step_ - std::max<int64_t>(skipped_in_a_row_, 1)),
             .remedy = loss_scale_.scales()
                           ? "the activations exceed fp16's 65,504: train in bf16 or fp32, or "
                             "lower optimizer.lr"
                           : divergence_remedy()});
    }

    std::string divergence_remedy() const {
        std::string text = "lower optimizer.lr";
        if (config_.clip_norm == 0) text += ", set clip_norm";
        return text + (skipped_in_a_row_ == kSkipsMost
                           ? ": " + std::to_string(kSkipsMost) + " steps in a row were skipped"
                           : ", or set on_nonfinite to \"skip\"");
    }

    // Finishes the last step; its time belongs to the steps.
    void drain() {
        const Nanos start = executor_.now();
        if (previous_ != Previous::none) {
            store_->append(drains_[static_cast<size_t>(previous_)], ++sequence_);
            previous_ = Previous::none;
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
        if (report.bet) ++(report.won ? totals_.bets_won : totals_.bets_lost);
    }

    const Config config_;
    Executor& executor_;
    trace::Recording* recording_;
    const Figures* figures_;
    std::array<trace::RowId, swap::kLanes> planned_rows_{};
    const optim::Hyper hyper_;
    const optim::LrSchedule schedule_;
    Topology topology_;
    std::unique_ptr<NodeTeams> teams_;
    model::Numerics numerics_;
    model::Shape shape_;
    TokenLoader loader_;
    std::vector<model::Layer> layers_;
    std::unique_ptr<LoadedWeights> loaded_;  // until the state is initialised
    std::unique_ptr<Device> device_;
    std::unique_ptr<ops::Ops> ops_;
    model::Decoder decoder_;
    Plan plan_;
    pinned_mem::Pool pool_;
    std::span<std::byte> arena_;
    PathRows path_rows_;
    std::unique_ptr<aio::Volume> volume_;
    StepKernels kernels_;
    // Before the store, which after an error still finishes tasks of the schedules it was given.
    std::array<std::array<swap::Schedule, 2>, kPrevious> steps_{};  // [previous][bets]
    std::array<swap::Schedule, kPrevious> drains_{};
    swap::Schedule evaluation_{};
    std::unique_ptr<swap::Store> store_;
    StateIo state_;
    Settler settler_;
    // Where there is a recording and the bound is known: what each schedule should take.
    std::array<std::array<swap::Timeline, 2>, kPrevious> planned_{};
    int64_t evaluation_size_ = 1;
    LossScale loss_scale_{numerics_.compute == DType::f16};
    int64_t skipped_in_a_row_ = 0;
    int64_t step_ = 0, updates_ = 0, sequence_ = 0;
    Previous previous_ = Previous::none;
    RunReport totals_{};
};

void Run::measure_bound() {
    if (figures_) return judge(*figures_);
    drain();             // then all buffers are free
    totals_ = report();  // what is moved from here on is not the run's
    kernels_.states()[0] = {.step = 1, .gradient_scale = 1};
    Figures figures = measure_figures(steps_[static_cast<size_t>(Previous::rest)][0], bench(),
                                      *teams_, settler_.scalars(1, 1.0)[0], arena_, shape_.vocab);
    figures.machine.links.nvme_bytes_per_s = time_storage(plan_, *store_, executor_);
    judge(figures);
    store_->reset_report();
}

// Bound and prediction by these figures.
void Run::judge(const Figures& figures) {
    const auto predict = [&](size_t steady, size_t bets) {
        return predict_steps(plan_, steps_[static_cast<size_t>(Previous::none)][bets],
                             steps_[steady][bets], figures);
    };
    totals_.predicted_seconds = predict(static_cast<size_t>(Previous::rest), 0).step_seconds;
    if (plan_.betting)
        totals_.predicted_betting_seconds =
            predict(static_cast<size_t>(Previous::won), 1).step_seconds;
    for (size_t previous = 0; recording_ && previous < kPrevious; ++previous) {
        planned_[previous][0] = predict(previous, 0);
        if (plan_.betting) planned_[previous][1] = predict(previous, 1);
    }
    const Bound bound =
        bound_of(config_, plan_, shape_, steps_[static_cast<size_t>(Previous::rest)][0], figures);
    if (totals_.bound_seconds == 0 || bound.seconds < totals_.bound_seconds) {
        totals_.bound_seconds = bound.seconds;
        totals_.binding = bound.binding;
    }
}

RunReport Run::report() {
    drain();
    RunReport report = totals_;
    const auto lanes = store_->report();
    report.links.resize(swap::kLanes);
    for (size_t lane = 0; lane < swap::kLanes; ++lane) {
        LinkReport& link = report.links[lane];
        link.link = swap::name_of(static_cast<swap::Lane>(lane));
        link.bytes += lanes[lane].bytes;
        link.busy_seconds += static_cast<double>(lanes[lane].busy_ns) * 1e-9;
    }
    if (volume_) report.paths = volume_->counters();
    return report;
}

}  // namespace

std::unique_ptr<Engine> Engine::make(const Config& config, const Runtime& runtime) {
    return std::make_unique<Run>(config, runtime);
}

}  // namespace ferry::train
