// `ferry train CONFIG`: runs the engine step by step and says what happened.
#include <spdlog/fmt/fmt.h>

#include <CLI/CLI.hpp>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>

#include "base/files.h"
#include "base/log.h"
#include "base/text.h"
#include "checkpoint/checkpoint.h"
#include "ferry/config.h"
#include "ferry/learning_rate.h"
#include "ferry/train.h"
#include "ranks.h"
#include "result_files.h"
#include "resume.h"
#include "run_saves.h"
#include "run_table.h"
#include "step_lines.h"
#include "tools/commands.h"
#include "tools/machine/find_measurements.h"
#include "tools/output/copy_progress.h"
#include "tools/output/json_line.h"
#include "tools/output/output.h"
#include "tools/process/interrupt.h"
#include "tools/process/rank_error.h"
#include "trace/trace.h"
#include "train/inside.h"
#include "train/saving/export.h"
#include "train/setup/from_config.h"
#include "train/state/saving.h"
#include "train_options.h"

namespace ferry::tools {
namespace {

// Every rank does the same; the first one prints and writes.
class TrainCommand {
public:
    // `rank` is this one's, once it is known.
    TrainCommand(const TrainOptions& options, int& rank)
        : options_(options),
          config_(options.overrides.checked(load_config(options.config, options.overrides.keys))),
          executor_(make_thread_executor()),
          saves_(config_, *executor_, options_.json),
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
          steps_(engine_->last_step()) {
        const bool saved = is_in(from_.checkpoint, config_.checkpoint.dir);
        saves_.begin_run(*engine_, saved ? steps_ : 0, speaks_);
    }

    void run() {
        telling(engine_.get(), [this] { train(); });
    }

private:
    void train() {
        saves_.make_way(from_);
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
            saves_.end_if_written();
            if (saves_.is_due(steps_)) save();
        }
        finish();
    }

    bool traces() const { return !trace_.empty(); }
    // Every rank has a file of its own beside the first one's.
    std::string trace_of(int rank) const {
        const bool first = rank == 0 || options_.trace.empty();
        return first ? options_.trace : options_.trace + "." + std::to_string(rank);
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
            telling(ranks.get(),
                    [this, rank] { check_trace_file(trace_of(rank), options_, config_); });
            return ranks;
        }
        telling(ranks.get(), [this] {
            check_result_files(options_, config_);
            saves_.claim(from_);
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
        print_evaluation(step, found, config_, options_.json);
        flush_output();
    }

    void print_hash(int64_t step) {
        const std::string hash = fmt::format("{:016x}", engine_->state_hash());
        if (!speaks_) return;
        tools::print_hash(step, hash, config_, options_.json);
    }

    void finish() {
        if (speaks_ && interrupted_ && !options_.json)
            print("interrupted {}\n", steps_ > 0 ? fmt::format("after step {}", steps_)
                                                 : std::string("before the first step"));
        if (steps_ == config_.steps) evaluate(steps_);
        attempt([this] {
            if (steps_ > saves_.saved()) save();
            saves_.end();
        });
        // The trained weights go first: nothing that comes after may cost them.
        if (!options_.weights_out.empty()) attempt([this] { write_weights(); });
        if (!options_.exported.directory.empty()) attempt([this] { export_model(); });
        saves_.end_removal();
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
        if (saves_.unsaved()) keep(*saves_.unsaved());
        if (failed_) throw Error(*failed_);
        check_left(report);
    }

    train::Inside inside() const { return train::Inside(*engine_); }

    void save() {
        saves_.begin(steps_, evaluated_ == steps_ ? std::optional(held_back_loss_) : std::nullopt);
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
    RunSaves saves_;  // join() claims their directory
    const ResumeFrom from_;
    std::unique_ptr<comm::Communicator> ranks_;  // until the engine has them
    const int gpu_;
    const bool speaks_;
    const std::string trace_;   // empty: none
    bool interrupted_ = false;  // any rank
    std::optional<Error> failed_{};
    trace::Recording recording_;
    std::optional<cost::Measurements> measurements_;
    std::unique_ptr<train::Engine> engine_;
    int64_t steps_ = 0, evaluated_ = -1;  // steps: of the run, before it was resumed too
    Yardsticks yardsticks_{};
    double held_back_loss_ = 0;  // the last evaluation's
    double lr_ = 0;              // the last step's
    double quiet_seconds_ = 0;   // since the last line
};

}  // namespace
}  // namespace ferry::tools

void add_train_command(CLI::App& app) {
    using namespace ferry::tools;
    auto options = std::make_shared<TrainOptions>();
    CLI::App* command = app.add_subcommand("train", "train the model that CONFIG describes");
    add_train_options(*command, *options);
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
