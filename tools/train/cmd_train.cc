// `ferry train CONFIG`: runs the engine step by step and says what happened.
#include <spdlog/fmt/fmt.h>

#include <CLI/CLI.hpp>
#include <atomic>
#include <filesystem>
#include <future>
#include <nlohmann/json.hpp>
#include <system_error>

#include "base/files.h"
#include "base/log.h"
#include "base/text.h"
#include "checkpoint/checkpoint.h"
#include "checkpoint/steps.h"
#include "ferry/config.h"
#include "ferry/learning_rate.h"
#include "ferry/train.h"
#include "ops/blas_kernels.h"
#include "ranks.h"
#include "resume.h"
#include "run_table.h"
#include "tools/commands.h"
#include "tools/machine/find_measurements.h"
#include "tools/options/export_options.h"
#include "tools/options/override_options.h"
#include "tools/output/copy_progress.h"
#include "tools/output/json_line.h"
#include "tools/output/output.h"
#include "tools/output/writable.h"
#include "tools/process/interrupt.h"
#include "tools/process/rank_error.h"
#include "trace/trace.h"
#include "train/inside.h"
#include "train/saving/export.h"
#include "train/setup/from_config.h"
#include "train/state/saving.h"

namespace ferry::tools {
namespace {

struct TrainOptions {
    std::string config{};
    Overrides overrides{};
    std::string weights_out{}, trace{}, machine{};
    train::ExportOptions exported{};
    bool json = false;
    bool bound = true;
    std::optional<std::string> resume{};  // "": with nothing behind it
};

// The bounds that a step is compared with, as known before the first: zeros where nothing was
// measured.
struct Yardsticks {
    double bound_seconds = 0;
    double model_flops = 0, gemm_flops_per_s = 0;
};

// Empty: the step was not skipped.
std::string why_skipped(const train::StepReport& report, const Config& config) {
    if (!report.skipped) return {};
    if (report.targets == 0) return "no real target";
    if (config.precision == DType::f16)
        return fmt::format("gradients overflowed at loss scale {}", report.loss_scale);
    return fmt::format("loss {:.4g}, gradient norm {:.4g}: not finite", report.loss,
                       report.gradient_norm);
}

// Null: there is no such number, which is not a 0. Of a step without targets nothing is computed;
// only a step that updates is clipped.
nlohmann::json to_json(const train::StepReport& report, const Config& config,
                       const Yardsticks& by) {
    const bool computed = report.targets > 0;
    const auto where = [](bool there, const auto& value) {
        return there ? nlohmann::json(value) : nlohmann::json();
    };
    const double mfu = computed ? mfu_of(by.model_flops / report.seconds, by.gemm_flops_per_s) : 0;
    const auto known = [](double value) {
        return value > 0 ? nlohmann::json(value) : nlohmann::json();
    };
    return {{"step", report.step},
            {"loss", where(computed, report.loss)},
            {"gradient_norm", where(computed, report.gradient_norm)},
            {"clip_factor", where(!report.skipped, report.clip_factor)},
            {"lr", report.lr},
            {"loss_scale", where(computed, report.loss_scale)},
            {"targets", report.targets},
            {"tokens", report.tokens},
            {"skipped", report.skipped},
            {"why_skipped", where(report.skipped, why_skipped(report, config))},
            {"speculative", report.speculative},
            {"committed", report.committed},
            {"seconds", report.seconds},
            {"tokens_per_second", static_cast<double>(report.tokens) / report.seconds},
            {"mfu", known(mfu)},
            {"bound_ratio", known(by.bound_seconds / report.seconds)}};
}

void print_step(const train::StepReport& report, const Config& config) {
    const int64_t steps = config.steps;
    if (report.skipped) {
        print("step {:>5}/{}  skipped: {}\n", report.step, steps, why_skipped(report, config));
        return;
    }
    print("step {:>5}/{}  loss {:.6f}  norm {:.4f}  lr {:.3e}  {:>7.0f} tokens/s{}{}\n",
          report.step, steps, report.loss, report.gradient_norm, report.lr,
          static_cast<double>(report.tokens) / report.seconds,
          report.clip_factor < 1 ? fmt::format("  clipped to {:.4f}", report.clip_factor) : "",
          report.speculative ? (report.committed ? "  committed" : "  rolled back") : "");
}

// Every rank does the same; the first one prints and writes.
class TrainCommand {
public:
    // `rank` is this one's, once it is known.
    TrainCommand(const TrainOptions& options, int& rank)
        : options_(options),
          config_(options.overrides.checked(load_config(options.config, options.overrides.keys))),
          executor_(make_thread_executor()),
          from_(resume_from(options_.resume, config_)),
          ranks_(join(rank)),
          gpu_(train::gpu_of_rank(config_, ranks_.get(), *executor_)),
          speaks_(rank == 0),
          trace_(trace_of(rank)),
          recording_(traces() ? kTraceSlices : 0),
          measurements_(measurements_in(options.machine)),
          engine_(train::Engine::make(
              config_, train::with({.executor = executor_.get(),
                                    .gpu = gpu_,
                                    .resume = from_.durable,
                                    .checkpoint = from_.checkpoint},
                                   {.recording = traces() ? &recording_ : nullptr,
                                    .measurements = measurements_ ? &*measurements_ : nullptr,
                                    .measures_bound = options_.bound,
                                    .ranks = std::move(ranks_)}))),
          steps_(engine_->last_step()),
          saved_(is_in(from_.checkpoint, config_.checkpoint.dir) ? steps_ : 0),
          saved_at_(executor_->now()) {}

    void run() {
        telling(engine_.get(), [this] { train(); });
    }

private:
    void train() {
        if (checkpoints_) make_way(*checkpoints_, from_);
        if (speaks_ && !options_.json) {
            print_plan(inside().plan(), config_);
            print("numerics {}\n\n", engine_->numerics_record());
            if (from_.any()) print("resumed after step {}\n", steps_);
            flush_output();  // a reader behind a pipe learns that the start-up is over
        }
        if (options_.bound) {
            engine_->measure_bound();
            const train::RunReport known = engine_->report();
            yardsticks_ = {known.bound_seconds, known.model_flops, known.gemm_flops_per_s};
        }
        // The interrupted run may have said it: a line twice is better than none.
        if (const train::StepReport* last = engine_->resumed_step()) {
            if (speaks_) say(*last);
            lr_ = last->lr;
        }
        evaluate(steps_);
        if (steps_ > 0 && config_.hash_every == HashEvery::step) print_hash(steps_);
        for (int64_t step = steps_ + 1; step <= config_.steps && !ends(); ++step) {
            const train::StepReport report = engine_->step();
            if (speaks_) say(report);
            lr_ = report.lr;
            if (train::evaluates_behind(config_, step)) evaluate(step);
            if (config_.hash_every == HashEvery::step) print_hash(step);
            steps_ = step;
            if (save_ && inside().save_ended()) end_save();
            if (is_save_due()) begin_save();
        }
        finish();
    }

    bool traces() const { return !trace_.empty(); }
    // Every rank has a file of its own beside the first one's.
    std::string trace_of(int rank) const {
        const bool first = rank == 0 || options_.trace.empty();
        return first ? options_.trace : options_.trace + "." + std::to_string(rank);
    }

    void check_trace(const std::string& file) const {
        check_writable("--trace", file, {.beginning = "{\"displayTimeUnit\""});
        check_differ("--trace", file, "--weights-out", options_.weights_out);
        check_outside("--trace", file, "the model that is trained", config_.model.path);
        check_outside("--trace", file, "--export", options_.exported.directory);
        check_no_volume("--trace", file, config_.budgets.nvme);
    }

    // Errors that can be known before the training must not cost the run's weights.
    std::unique_ptr<comm::Communicator> join(int& rank) {
        auto ranks = join_ranks(config_, *executor_, "train",
                                {{"--no-bound", !options_.bound},
                                 {"--machine", !options_.machine.empty()},
                                 {"--weights-out", !options_.weights_out.empty()},
                                 {"--export", !options_.exported.directory.empty()},
                                 {"--resume", from_.any()}});
        rank = rank_of(ranks.get());
        if (rank != 0) {
            telling(ranks.get(), [this, rank] { check_trace(trace_of(rank)); });
            return ranks;
        }
        telling(ranks.get(), [this] {
            check_writable("--weights-out", options_.weights_out, checkpoint::kSafetensors);
            check_trace(options_.trace);
            check_outside("--weights-out", options_.weights_out, "the model that is trained",
                          config_.model.path);
            check_outside("--weights-out", options_.weights_out, "--export",
                          options_.exported.directory);
            check_no_volume("--weights-out", options_.weights_out, config_.budgets.nvme);
            check_no_volume("--export", options_.exported.directory, config_.budgets.nvme);
            checkpoints_ = claim_checkpoints(config_, from_);
            if (!options_.exported.directory.empty())
                export_directory_.emplace(options_.exported.directory, config_);
        });
        return ranks;
    }

    // Ctrl-C reaches the ranks one by one: all stop after the same step.
    bool ends() { return interrupted_ = interrupted_ || engine_->any(interrupted()); }

    void say(const train::StepReport& report) {
        if (options_.json) {
            print("{}", json_line(to_json(report, config_, yardsticks_)));
        } else if (worth_a_line(report)) {
            print_step(report, config_);
        }
        flush_output();
    }

    std::optional<cost::Measurements> measurements_in(const std::string& file) const {
        if (file.empty()) return std::nullopt;
        train::RankCount count;
        if (ranks_) count = {ranks_->size(), ranks_->local_size(), gpu_};
        return telling(ranks_.get(),
                       [&] { return known_measurements(config_, count, MachineFile::read(file)); });
    }

    // About fifty lines a run, and a sign of life at least every ten seconds.
    bool worth_a_line(const train::StepReport& report) {
        constexpr double kQuietSeconds = 10;
        const int64_t every = std::max<int64_t>(1, config_.steps / 50);
        quiet_seconds_ += report.seconds;
        const bool due = report.step % every == 0 || report.step == 1 ||
                         report.step == config_.steps || quiet_seconds_ >= kQuietSeconds;
        if (due) quiet_seconds_ = 0;
        return due;
    }

    void evaluate(int64_t step) {
        if (config_.evaluate.micro_batches == 0 || step == evaluated_) return;
        evaluated_ = step;
        const train::Evaluation found = engine_->evaluate();
        held_back_loss_ = found.loss;
        if (!speaks_) return;
        if (options_.json) {
            const nlohmann::json line{{"step", step},
                                      {"evaluation_loss", found.loss},
                                      {"perplexity", found.perplexity()}};
            print("{}", json_line(line));
        } else {
            print("step {:>5}/{}  held-back loss {:.6f}, perplexity {:.4g}\n", step, config_.steps,
                  found.loss, found.perplexity());
        }
        flush_output();
    }

    void print_hash(int64_t step) {
        const std::string hash = fmt::format("{:016x}", engine_->state_hash());
        if (!speaks_) return;
        if (options_.json) {
            nlohmann::json line{{"step", step}, {"state_hash", hash}};
            if (config_.device == DeviceKind::cpu) line["kernels"] = ops::blas_core();
            print("{}", json_line(line));
        } else {
            // Whoever compares hashes of two machines must know it here.
            print("step {:>5}/{}  state hash {}{}\n", step, config_.steps, hash,
                  config_.device == DeviceKind::cpu
                      ? fmt::format(" with OpenBLAS's {} kernels (others round differently)",
                                    ops::blas_core())
                      : "");
        }
    }

    void finish() {
        if (speaks_ && interrupted_ && !options_.json)
            print("interrupted {}\n", steps_ > 0 ? fmt::format("after step {}", steps_)
                                                 : std::string("before the first step"));
        if (steps_ == config_.steps) evaluate(steps_);
        attempt([this] {
            if (steps_ > saved_) begin_save();
            end_save();
        });
        // The trained weights go first: nothing that comes after may cost them.
        if (!options_.weights_out.empty()) attempt([this] { write_weights(); });
        if (!options_.exported.directory.empty()) attempt([this] { export_model(); });
        end_removal();
        train::RunReport report = engine_->report();  // waits for what the steps left under way
        if (traces()) attempt([this] { write_trace(); }, true);
        // Once more: a bound taken while the machine was busy elsewhere would flatter the run.
        if (options_.bound && steps_ > 0) {
            engine_->measure_bound();
            report = engine_->report();
        }
        if (speaks_) say(report);
        if (speaks_ && report.steps > 0 && report.skipped_steps == report.steps)
            log_warn("nothing was trained: every step was skipped");
        if (config_.hash_every != HashEvery::step) print_hash(steps_);
        if (unsaved_) keep(*unsaved_);
        if (failed_) throw Error(*failed_);
        check_left(report);
    }

    // On all ranks alike, by the first one's clock.
    bool is_save_due() {
        const Period& every = config_.checkpoint.every;
        if (every.steps > 0) return train::saves_behind(config_, steps_);
        if (every.seconds == 0) return false;
        const double since = static_cast<double>(executor_->now() - saved_at_) * 1e-9;
        return engine_->any(speaks_ && since >= every.seconds);
    }

    // A checkpoint on its way.
    struct Save {
        Save(int64_t of_step, const Executor& executor)
            : step(of_step), progress(fmt::format("checkpoint of step {}", of_step), executor) {}
        const int64_t step;
        CopyProgress progress;
        std::atomic<int64_t> bytes = 0;
        std::atomic<double> written_seconds = 0;  // when the last of them was
        std::atomic<bool> alone = true;           // the run waits for it
        double started_seconds = 0, begun_seconds = 0, waited_seconds = 0;
    };

    train::Inside inside() const { return train::Inside(*engine_); }

    // Training goes on with what comes after, where there is memory for what is not written yet.
    void begin_save() {
        if (config_.checkpoint.dir.empty()) return;
        end_save();  // the one before ends first
        save_.emplace(steps_, *executor_);
        Save& save = *save_;
        end_removal();
        save.waited_seconds = save.progress.seconds();
        inside().begin_save(
            {.directory = checkpoints_.get(),
             .held_back_loss = evaluated_ == steps_ ? std::optional(held_back_loss_) : std::nullopt,
             .progress =
                 [&save](int64_t written, int64_t of) {
                     save.bytes = written;
                     save.written_seconds = save.progress.seconds();
                     if (save.alone) save.progress.at(written, of);
                 },
             .started = [&save] { save.started_seconds = save.progress.seconds(); },
             .begun = [&save] { save.begun_seconds = save.progress.seconds(); },
             .waited = [&save](double seconds) { save.waited_seconds += seconds; },
             .program = FERRY_VERSION});
        save.waited_seconds += save.progress.seconds() - save.begun_seconds;
        save.alone = false;
        saved_ = steps_;
        saved_at_ = executor_->now();
        if (config_.checkpoint.memory_bytes == 0) end_save();
    }

    // Waits for the one that is on its way.
    void end_save() {
        if (!save_) return;
        Save& save = *save_;
        const double before = save.progress.seconds();
        save.alone = true;
        const double waited = save.waited_seconds;
        unsaved_ = inside().end_save();
        save.waited_seconds = waited + save.progress.seconds() - before;
        if (speaks_ && !unsaved_) say_saved(save);
        save_.reset();
        if (!speaks_ || !unsaved_) return;
        if (config_.checkpoint.on_failure == UnsavedRun::stop) throw Error(*unsaved_);
        log_warn(std::string(unsaved_->what()) + "; the run goes on (checkpoint.on_failure)");
    }

    void say_saved(const Save& save) {
        const std::string path =
            std::filesystem::path(config_.checkpoint.dir) / checkpoint::name_of_step(save.step);
        // The thread that trains looks for its end between steps alone.
        const double seconds =
            std::max(save.written_seconds - save.started_seconds, save.waited_seconds);
        if (options_.json) {
            const nlohmann::json line{{"step", save.step},
                                      {"checkpoint", path},
                                      {"bytes", save.bytes.load()},
                                      {"seconds", seconds},
                                      {"waited_seconds", save.waited_seconds}};
            print("{}", json_line(line));
        } else {
            print("step {:>5}/{}  checkpoint {}: {} in {:.2f} s, of which training waited {:.2f}\n",
                  save.step, config_.steps, one_line(path), format_bytes(save.bytes), seconds,
                  save.waited_seconds);
        }
        flush_output();
        // A file system takes seconds to remove many gigabytes.
        try {
            removal_ = std::async(std::launch::async, [this] { retain(); });
        } catch (const std::system_error&) {
            retain();  // there is no thread to be had
        }
    }

    void retain() const {
        const KeptCheckpoints& keep = config_.checkpoint.keep;
        try {
            checkpoints_->retain({.last = keep.last, .every = keep.every, .best = keep.best});
        } catch (const Error& error) {
            log_warn(error.what());  // there are more than are wanted
        }
    }
    // Until those that are no longer wanted are gone.
    void end_removal() {
        if (removal_.valid()) removal_.get();
    }

    // Durable steps were asked for, and whoever looks for them must not learn it only then.
    void check_left(const train::RunReport& report) const {
        if (report.removed.empty()) return;
        throw Error(Trouble::io,
                    {.what = "the run came to its end, but nothing durable is left of it: a file "
                             "of its state was removed, replaced or overwritten",
                     .where = report.removed,
                     .measured = fmt::format("the run ended after step {}", steps_),
                     .remedy = "start again where more steps are wanted; give budgets.nvme a "
                               "directory that nothing else clears"});
    }

    // A file that cannot be written costs no other, nor the summary: the first such error is thrown
    // after it. What the engine throws is thrown at once where other ranks took part.
    template <class Write>
    void attempt(const Write& write, bool alone = false) {
        try {
            write();
        } catch (const Error& error) {
            if (!alone && !inside().plan().partition.decides_alone()) throw;
            keep(error);
        }
    }

    void keep(const Error& error) {
        if (failed_) log_warn(error.what());
        if (!failed_) failed_ = error;
    }

    // And how to come by what was trained.
    void keep_of_weights(const train::NotWritten& failed) {
        Problem problem = failed.why.problem();
        if (!failed.whole_elsewhere)
            problem.remedy +=
                inside().plan().durable
                    ? "; the durable state has these weights too: --resume with --weights-out or "
                      "--export writes them again"
                    : "; weights that are in no file end with this process "
                      "(checkpoint.durable_steps keeps them for --resume)";
        keep(Error(failed.why.trouble(), std::move(problem)));
    }

    void say(const train::RunReport& report) {
        if (options_.json) {
            nlohmann::json line = summary_json(report, inside().plan(), config_);
            line["summary"]["interrupted"] = interrupted_;
            line["summary"]["lr"] = steps_ > 0 ? nlohmann::json(lr_) : nlohmann::json();
            line["summary"]["scheduled_lr"] =
                steps_ > 0 ? nlohmann::json(scheduled_lr()) : nlohmann::json();
            print("{}", json_line(line));
        } else {
            print_run(report, config_);
            if (report.steps > 0 && lr_ != scheduled_lr())
                print(
                    "  learning rate at the end {:.3e}, not {:.3e}: skipped steps do not move the "
                    "schedule on\n",
                    lr_, scheduled_lr());
        }
    }

    // The learning rate of the last step, had none been skipped.
    double scheduled_lr() const {
        return optim::learning_rate(train::schedule_of(config_), steps_);
    }

    void write_trace() {
        recording_.write(trace_);
        if (!speaks_) return;
        if (!options_.bound) log_info("the trace has nothing planned: --no-bound predicts no step");
        if (recording_.dropped() == 0) return;
        log_warn(fmt::format("the trace holds the first {} tasks of the run; {} more did not fit",
                             recording_.size(), recording_.dropped()));
    }

    void write_weights() {
        if (!speaks_) return train::give_weights(*engine_);
        std::vector<checkpoint::TensorInfo> infos;
        for (const model::Layer& layer : inside().layers()) {
            for (const model::Tensor& tensor : layer.tensors)
                infos.push_back({tensor.name, tensor.whole_shape()});
        }
        CopyProgress progress("weights to " + options_.weights_out, *executor_);
        int64_t bytes = 0, of = 0;
        for (const checkpoint::TensorInfo& info : infos) of += 4 * info.count();
        const auto failed = train::write_weights(*engine_, [&](const train::TensorSource& source) {
            checkpoint::write_safetensors(options_.weights_out, infos, DType::f32,
                                          [&](size_t i, const train::ValueSink& sink) {
                                              source(i, [&](std::span<const float> values) {
                                                  sink(values);
                                                  progress.at(bytes += 4 * std::ssize(values), of);
                                              });
                                          });
        });
        if (failed) keep_of_weights(*failed);
    }

    void export_model() {
        CopyProgress progress("export to " + options_.exported.directory, *executor_);
        const auto failed = train::export_model(
            *engine_, config_, options_.exported, export_directory_ ? &*export_directory_ : nullptr,
            [&](int64_t bytes, int64_t of) { progress.at(bytes, of); });
        if (failed) keep_of_weights(*failed);
    }

    TrainOptions options_;
    const Config config_;
    static constexpr size_t kTraceSlices = 400'000;             // 36 MB
    std::optional<train::ExportDirectory> export_directory_{};  // join() claims it
    std::unique_ptr<Executor> executor_;
    const ResumeFrom from_;
    std::unique_ptr<checkpoint::Steps> checkpoints_{};  // the first rank's; join() claims it
    std::unique_ptr<comm::Communicator> ranks_;         // until the engine has them
    const int gpu_;
    const bool speaks_;
    const std::string trace_;   // empty: none
    bool interrupted_ = false;  // any rank
    std::optional<Error> failed_{};
    trace::Recording recording_;
    std::optional<cost::Measurements> measurements_;
    std::optional<Save> save_{};   // the engine's thread writes it
    std::future<void> removal_{};  // of checkpoints that are no longer wanted
    std::unique_ptr<train::Engine> engine_;
    int64_t steps_ = 0, evaluated_ = -1;  // steps: of the run, before it was resumed too
    Yardsticks yardsticks_{};
    int64_t saved_ = 0;  // the last step that a checkpoint was tried of
    Nanos saved_at_ = 0;
    std::optional<Error> unsaved_{};  // why the last checkpoint was not written
    double held_back_loss_ = 0;       // the last evaluation's
    double lr_ = 0;                   // the last step's
    double quiet_seconds_ = 0;        // since the last line
};

}  // namespace
}  // namespace ferry::tools

void add_train_command(CLI::App& app) {
    using namespace ferry::tools;
    auto options = std::make_shared<TrainOptions>();
    CLI::App* command = app.add_subcommand("train", "train the model that CONFIG describes");
    // Required, which is seen to below: behind a bare --resume it is taken for that one's.
    command->add_option("config", options->config, "JSON configuration (docs/configuration.md)")
        ->option_text("REQUIRED");
    add_overrides(*command, options->overrides, "override a key: --set budgets.host=64MiB");
    command->add_option("--weights-out", options->weights_out,
                        "write the final fp32 weights (safetensors)");
    add_export_options(*command, "--export", options->exported);
    command->add_option("--trace", options->trace,
                        "write what each lane did when, and beside it what was planned (Chrome "
                        "trace: ui.perfetto.dev); of several ranks each, rank 1 to FILE.1");
    command->add_option(
        "--machine", options->machine,
        "a machine file (docs/machine.md): bound and prediction by its measurements, "
        "nothing is measured");
    command
        ->add_option_function<std::string>(
            "--resume", [options](const std::string& from) { options->resume = from; },
            "go on from a checkpoint (docs/checkpoints.md): from DIR, which is one or holds some; "
            "`latest` is the newest in checkpoint.dir. Alone it is that as well, or with "
            "checkpoint.durable_steps the last durable step, at most two before the last that the "
            "run finished")
        ->expected(0, 1)
        ->option_text("[DIR|latest]");
    command->add_flag("--json", options->json, "one JSON object a step on standard output");
    command->add_flag_callback(
        "--no-bound", [options] { options->bound = false; },
        "do not measure the lower bound of a step first");
    command->footer(
        "Ctrl-C ends the run after its step, with the summary and exit code 0; a second one kills "
        "it.\n"
        "Exit codes: 0 done, 1 a bug in ferry, 2 configuration or usage, 3 does not fit a budget,\n"
        "            4 I/O failed or bytes are corrupt, 5 loss or gradient not finite,\n"
        "            6 another rank was lost\n"
        "Several ranks: mpirun --bind-to none -n N ferry train CONFIG, or srun; the first one\n"
        "prints. Ctrl-C there is mpirun's, which kills ranks a second later: SIGUSR1 to mpirun, "
        "or\n"
        "Ctrl-C of `ferry launch`, ends them all after their step.\n"
        "Example: ferry train my.json --set model.path=DIR --export TUNED");
    command->callback([options] {
        if (options->config.empty() && options->resume &&
            ferry::kind_of(*options->resume) == ferry::FileKind::regular) {
            options->config = *options->resume;
            options->resume = "";
        }
        if (options->config.empty()) throw CLI::RequiredError("config");
        catch_interrupts();
        int rank = ferry::comm::launched_rank().value_or(0);
        naming_rank(rank, [&] { TrainCommand(*options, rank).run(); });
    });
}
